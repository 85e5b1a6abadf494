-- Makes a tenant's complete state under an epoch. The state before it is deleted.
-- KEYS  1 the name of the data life  2 state  3 open  4 the prefix of every reservation's key  5.. windows, then the
--       reservations to make, then those to delete
-- ARGV  1 time ('' outside tests)  2 JSON: life (in which the books were read), epoch, windows ({bucket, amount} pairs of each), budgets ({row, budget,
--       used, limit, hardness, version} each), built (no request that began later is in the books or a list), requests
--       (id, slot, places, rows, w, input, in_s, bound, at_s, seq, mu), term
-- Answer {'ok'}; {'none'} if the state of this epoch or a later one exists already; {'lost'} if Redis has lost its data
--        since the books were read: who has not noticed would take this state, which knows no grant under it; or {'forget', ids} if these
--        requests are open and not among KEYS (nothing was done)
local life, state, open = KEYS[1], KEYS[2], KEYS[3]
local ask = cjson.decode(ARGV[2])
if redis.call('GET', life) ~= ask.life then return {'lost'} end
local before = redis.call('HMGET', state, 'ep', 'hwm')
if tonumber(before[1] or '-1') >= ask.epoch then return {'none'} end
local is_key, unknown = {}, {}
for _, key in ipairs(KEYS) do is_key[key] = true end
for _, id in ipairs(redis.call('ZRANGE', open, 0, -1)) do
  if not is_key[KEYS[4] .. id] then unknown[#unknown + 1] = id end
end
if #unknown > 0 then return {'forget', unknown} end
for i = 2, #KEYS, 1000 do redis.call('DEL', unpack(KEYS, i, math.min(i + 999, #KEYS))) end
redis.call('HSET', state, 'ep', ask.epoch, 'n', 0, 'mu', 0, 'hwm', before[2] or 0)
local now = clock(state, ARGV[1])
if not now then
  redis.call('HSET', state, 'hwm', 0)
  now = clock(state, ARGV[1])
end
for i, buckets in ipairs(ask.windows) do window_set(KEYS[4 + i], buckets, second_of(now)) end
local fields, starts = {'built', ask.built}, {}
for _, b in ipairs(ask.budgets) do
  for _, value in ipairs({'u:' .. b[1], b[3], 'h:' .. b[1], 0, 'l:' .. b[1], b[4], 'k:' .. b[1], b[5], 'v:' .. b[1], b[6]}) do
    fields[#fields + 1] = value
  end
  starts[b[2]] = b[1] .. ' ' .. (starts[b[2]] or '')
end
set_fields(state, fields)
fields = {}
for budget, rows in pairs(starts) do
  fields[#fields + 1] = 'p:' .. budget
  fields[#fields + 1] = rows
end
set_fields(state, fields)
for i, r in ipairs(ask.requests) do
  local reservation = KEYS[4 + #ask.windows + i]
  redis.call('HSET', reservation, 'state', 'open', 'slot', r.slot, 'places', table.concat(r.places, ' '),
    'rows', table.concat(r.rows, ' '), 'w', table.concat(r.w, ' '), 'in', r.input, 'in_s', r.in_s, 'bound', r.bound,
    'o' .. r.at_s, r.bound, 'seq', r.seq, 'wait', 0, 'stop', '', 'mu', r.mu)
  hold(state, r.rows, r.mu)
  count_open(state, r.places, 1, r.input + r.bound)
  redis.call('ZADD', open, now + ask.term, r.id)
end
return {'ok'}
