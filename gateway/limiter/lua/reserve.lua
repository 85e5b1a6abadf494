-- Admits a request at every level or at none: the prompt and the largest affordable first lease.
-- KEYS  1 state  2 open  3 reservation  4.. windows, then with `shadow` the refusals in shadow mode
-- ARGV  1 time ('' outside tests)  2 JSON: epoch, id, slot, places, limits ({number of its window, limit, shadow}
--       each), running ({place, limit, shadow} each), budgets ({row, budget, start, limit, hardness, version} each),
--       prompt, cost of the prompt, term in ms, ladder ({tokens, cost} each, largest first; none: no output), and if
--       one of the limits or budgets is a shadow, shadow: the name of each of them in this order, '' if not counted
-- Answer {'rebuild', epoch}, {'ended'}, {'inexact'}, or
--   {'ok' | 'refused', now, bound, micro-units reserved, number of the failing limit (limits, then running, then
--    budgets; 0: none), ms until it would fit (-1: never), {sum, ms until empty, open tokens of its place} of the
--    windows, {open requests} of the running, {used, held} of the budgets, {numbers of the shadow limits that
--    would have refused}}
-- A repeated call gets the same bound, and nothing is taken twice.
local state, open, reservation = KEYS[1], KEYS[2], KEYS[3]
local ask = cjson.decode(ARGV[2])
local shadow = ask.shadow and table.remove(KEYS)
if not is_current(state, open, ask.epoch) then return rebuild(state) end
local known = redis.call('HMGET', reservation, 'state', 'bound', 'mu')
if known[1] == 'ended' then return {'ended'} end
local numbers = {ask.prompt, ask.cost}
for _, rung in ipairs(ask.ladder) do numbers[#numbers + 1] = ask.cost + rung[2] end
for _, b in ipairs(ask.budgets) do numbers[#numbers + 1] = b[4] end
if not all_exact(numbers) then return {'inexact'} end
if not rows_exist(state, ask.budgets) then return rebuild(state) end
learn_limits(state, ask.budgets)

local now = clock(state, ARGV[1])
if not now then return rebuild(state) end
local second = second_of(now)
local windows, rows, places, shadowed = windows_of(KEYS, second), {}, {}, {}
for i, b in ipairs(ask.budgets) do rows[i] = b[1] end
for i, r in ipairs(ask.running) do places[i] = r[1] end
local money, running = money_of(state, rows), prefixed('run:', places)

local function report(status, bound, mu, failing, wait, counts, newly_held)
  local flat = {}
  for _, m in ipairs(money) do
    flat[#flat + 1] = m[4]
    flat[#flat + 1] = m[5] + newly_held
  end
  return {status, now, bound, mu, failing, wait, sums_of(state, windows, now), counts, flat, shadowed}
end

if known[1] == 'open' and redis.call('ZSCORE', open, ask.id) then
  return report('ok', tonumber(known[2]), tonumber(known[3]), 0, 0, numbers_of(state, running), 0)
end

local smallest = ask.ladder[#ask.ladder] or {0, 0}
local failing, wait, counted = 0, 0, {}
local function refuse(number, is_shadow, ms)
  if is_shadow then
    shadowed[#shadowed + 1] = number
    local name = shadow and ask.shadow[number] or ''
    if name ~= '' then counted[#counted + 1] = name end
    return
  end
  if failing == 0 then failing = number end
  if ms < 0 or wait < 0 then wait = -1 else wait = math.max(wait, ms) end
end
for i, l in ipairs(ask.limits) do
  local window, limit = windows[l[1]], l[2]
  local need = taken(window.unit, 1, ask.prompt, smallest[1])
  if window.sum + need > limit then
    refuse(i, l[3] == 1, need > limit and -1 or until_free(window, now, window.sum + need - limit))
  end
end
local counts = numbers_of(state, running)
for i, r in ipairs(ask.running) do
  if counts[i] >= r[2] then
    refuse(#ask.limits + i, r[3] == 1, r[2] == 0 and -1 or 1000)   -- the end of a running request is not known
  end
end
for i, m in ipairs(money) do
  if m[2] ~= 'soft' and ask.cost + smallest[2] > m[3] then
    refuse(#ask.limits + #ask.running + i, m[2] == 'shadow', -1)
  end
end
count_shadowed(shadow, counted, now)
if failing > 0 then return report('refused', 0, 0, failing, wait, counts, 0) end

local bound, cost = best_rung(ask.ladder, windows, ask.limits, ask.prompt, money, ask.cost)
local mu, names = ask.cost + cost, {}
for i, window in ipairs(windows) do
  window_add(window, second, taken(window.unit, 1, ask.prompt, bound))
  names[i] = window.name
end
hold(state, rows, mu)
redis.call('DEL', reservation)
redis.call('HSET', reservation, 'state', 'open', 'slot', ask.slot, 'places', table.concat(ask.places, ' '),
  'rows', table.concat(rows, ' '), 'w', table.concat(names, ' '), 'in', ask.prompt, 'in_s', second,
  'bound', bound, 'o' .. second, bound, 'seq', 0, 'wait', 0, 'stop', '', 'mu', mu)
count_open(state, ask.places, 1, ask.prompt + bound)
redis.call('ZADD', open, now + ask.term, ask.id)
return report('ok', bound, mu, 0, 0, numbers_of(state, running), mu)
