-- Makes a tenant's state anew, complete, under an epoch. What was there before is forgotten.
-- KEYS  1 state  2 open  3 unused  4.. windows, then the reservations to make, then those to forget
-- ARGV  1 time ('' but in tests)  2 JSON: epoch, windows ({bucket, amount} pairs of each), budgets ({row, budget, used,
--       limit, hardness, version} each), requests (id, slot, places, rows, w, input, in_s, bound, at_s, seq, mu), term
-- Answer {'ok'}, or {'none'}: this epoch's state, or a later one's, is there already
local state, open = KEYS[1], KEYS[2]
local ask = cjson.decode(ARGV[2])
if tonumber(redis.call('HGET', state, 'ep') or '-1') >= ask.epoch then return {'none'} end
local mark = redis.call('HGET', state, 'hwm') or 0
redis.call('DEL', state, open)
for i = 4, #KEYS do redis.call('DEL', KEYS[i]) end
redis.call('HSET', state, 'ep', ask.epoch, 'n', 0, 'mu', 0, 'hwm', mark)
local now = clock(state, ARGV[1])
redis.call('HSET', state, 'built', now)
for i, buckets in ipairs(ask.windows) do
  window_set(KEYS[3 + i], buckets, second_of(now))
end
for _, b in ipairs(ask.budgets) do
  redis.call('HSET', state, 'u:' .. b[1], b[3], 'h:' .. b[1], 0, 'l:' .. b[1], b[4], 'k:' .. b[1], b[5],
    'v:' .. b[1], b[6], 'p:' .. b[2], b[1] .. ' ' .. (redis.call('HGET', state, 'p:' .. b[2]) or ''))
end
for i, r in ipairs(ask.requests) do
  local reservation = KEYS[3 + #ask.windows + i]
  redis.call('HSET', reservation, 'state', 'open', 'slot', r.slot, 'places', table.concat(r.places, ' '),
    'rows', table.concat(r.rows, ' '), 'w', table.concat(r.w, ' '), 'in', r.input, 'in_s', r.in_s, 'bound', r.bound,
    'o' .. r.at_s, r.bound, 'seq', r.seq, 'wait', 0, 'stop', '', 'mu', r.mu)
  hold(state, r.rows, r.mu)
  count_open(state, r.places, 1, r.input + r.bound)
  redis.call('ZADD', open, now + ask.term, r.id)
end
return {'ok'}
