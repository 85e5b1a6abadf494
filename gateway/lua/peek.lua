-- What counts against a key's limits and budgets now; takes nothing.
-- KEYS  1 state  2 open  3 any of the tenant's (unused)  4.. windows
-- ARGV  1 time ('' but in tests)  2 JSON: epoch, running (places), rows (of budgets)
-- Answer {'rebuild', epoch} or {'ok', now, {sum, ms until empty, open tokens of its place} of the windows, {open
--       requests} of the running, {used, held} of the rows}
local state, open = KEYS[1], KEYS[2]
local ask = cjson.decode(ARGV[2])
if not is_current(state, open, ask.epoch) then return rebuild(state) end
local now = clock(state, ARGV[1])
local sums, running, money = {}, {}, {}
for _, window in ipairs(windows_of(KEYS)) do
  local sum = window_sum(window, second_of(now))
  sums[#sums + 1] = sum
  sums[#sums + 1] = until_empty(window, now, sum)
  sums[#sums + 1] = tonumber(redis.call('HGET', state, 'tok:' .. place_of(window)) or '0')
end
for i, place in ipairs(ask.running) do running[i] = tonumber(redis.call('HGET', state, 'run:' .. place) or '0') end
for _, row in ipairs(ask.rows) do
  local m = money_of(state, row)
  money[#money + 1] = m[4]
  money[#money + 1] = m[5]
end
return {'ok', now, sums, running, money}
