-- Grants a running request the largest affordable rung of its ladder; or 0, with the ms until the smallest rung fits
-- its windows, or with the budget that cannot pay for it.
-- KEYS  1 state  2 open  3 reservation  4.. windows
-- ARGV  1 time ('' outside tests)  2 JSON: epoch, id, seq, limits ({number of its window, limit, shadow} each),
--       budgets (as of now: {row, budget, start, limit, hardness, version} each), known (a row that is not among them
--       and is older than this version was deleted), counted (prompt tokens that really count; -1: not known yet), term
--       in ms, ladder ({tokens, cost} each, largest first)
-- Answer {'rebuild', epoch}, {'ended'}, {'inexact'} or {'ok', bound over all leases, wait in ms, micro-units reserved
--       in all, row of the budget that stops it or ''}
-- A call with a seq already seen gets the recorded answer.
local state, open, reservation = KEYS[1], KEYS[2], KEYS[3]
local ask = cjson.decode(ARGV[2])
local fields = {'state', 'places', 'in', 'in_s', 'bound', 'seq', 'wait', 'mu', 'stop', 'rows'}
local entry = redis.call('HMGET', reservation, unpack(fields))
if entry[1] == 'ended' then return {'ended'} end
if not is_current(state, open, ask.epoch) then return rebuild(state) end
if not redis.call('ZSCORE', open, ask.id) then return {'ended'} end   -- the state was rebuilt without this request
local numbers = {}
for _, rung in ipairs(ask.ladder) do numbers[#numbers + 1] = rung[2] end
for _, b in ipairs(ask.budgets) do numbers[#numbers + 1] = b[4] end
if not all_exact(numbers) then return {'inexact'} end

local now = clock(state, ARGV[1])
if not now then return rebuild(state) end
local second = second_of(now)
local windows = windows_of(KEYS, second)
local places, input, bound, mu = words(entry[2]), tonumber(entry[3]), tonumber(entry[5]), tonumber(entry[8])
redis.call('ZADD', open, now + ask.term, ask.id)
if ask.counted >= 0 and ask.counted < input then
  for _, window in ipairs(windows) do
    window_add(window, tonumber(entry[4]), taken(window.unit, 0, ask.counted - input, 0))
  end
  redis.call('HSET', reservation, 'in', ask.counted)
  count_open(state, places, 0, ask.counted - input)
end
if ask.seq <= tonumber(entry[6]) then return {'ok', bound, tonumber(entry[7]), mu, entry[9]} end

local given, rows, binding = {}, words(entry[10]), {}
for _, b in ipairs(ask.budgets) do given[b[1]] = true end
learn_limits(state, ask.budgets)
for _, row in ipairs(rows) do
  local version = tonumber(redis.call('HGET', state, 'v:' .. row) or '-1')
  if given[row] or version > ask.known then binding[#binding + 1] = row end
end
local money = money_of(state, binding)
local tokens, cost = best_rung(ask.ladder, windows, ask.limits, 0, money, 0)
local wait, stop, smallest = 0, '', ask.ladder[#ask.ladder]
if tokens == 0 and smallest then
  for _, l in ipairs(ask.limits) do
    local window = windows[l[1]]
    local excess = window.sum + taken(window.unit, 0, 0, smallest[1]) - l[2]
    if l[3] == 0 and excess > 0 then
      wait = math.max(wait, excess > window.sum and 60000 or until_free(window, now, excess))
    end
  end
  for _, m in ipairs(money) do
    if stop == '' and m[2] == 'hard' and smallest[2] > m[3] then stop = m[1] end
  end
end
if tokens > 0 then
  for _, window in ipairs(windows) do window_add(window, second, taken(window.unit, 0, 0, tokens)) end
  redis.call('HINCRBY', reservation, 'o' .. second, tokens)
  count_open(state, places, 0, tokens)
  hold(state, rows, cost)
end
bound, mu = bound + tokens, mu + cost
redis.call('HSET', reservation, 'bound', bound, 'seq', ask.seq, 'wait', wait, 'stop', stop, 'mu', mu)
return {'ok', bound, wait, mu, stop}
