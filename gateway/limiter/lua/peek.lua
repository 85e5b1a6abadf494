-- Reads the amounts that count against a key's limits and budgets now; reserves nothing.
-- KEYS  1 state  2 open  3 any key of the tenant (unused)  4.. windows, then the refusals in shadow mode
-- ARGV  1 time ('' outside tests)  2 JSON: epoch, running (places), rows (of budgets), shadow (names of limits)
-- Answer {'rebuild', epoch} or {'ok', now, {sum, ms until empty, open tokens of its place} of the windows, {open
--       requests} of the running, {used, held} of the rows, {requests that it would have refused} of the shadows}
local state, open = KEYS[1], KEYS[2]
local ask = cjson.decode(ARGV[2])
local shadow = table.remove(KEYS)
if not is_current(state, open, ask.epoch) then return rebuild(state) end
local now = clock(state, ARGV[1])
if not now then return rebuild(state) end
local windows, money = windows_of(KEYS, second_of(now)), {}
for _, m in ipairs(money_of(state, ask.rows)) do
  money[#money + 1] = m[4]
  money[#money + 1] = m[5]
end
local running = numbers_of(state, prefixed('run:', ask.running))
return {'ok', now, sums_of(state, windows, now), running, money, shadowed_of(shadow, ask.shadow, now)}
