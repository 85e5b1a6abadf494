-- Grants a running request the largest affordable rung of its ladder, or 0 and the ms until one token fits.
-- KEYS  1 state  2 open  3 reservation  4 key tokens  5 tenant tokens
-- ARGV  1 time ('' but in tests)  2 epoch  3 request id  4 lease_seq  5 tokens per minute of the key (-1: none)
--       6 of the tenant  7 prompt tokens that count after all (-1: not known yet)  8 term in ms
--       9.. ladder: tokens, cost, largest first
-- Answer {'rebuild'}, {'ended'} or {'ok', bound over all leases, wait in ms, micro-units reserved in all}
-- Repeated with a lease_seq already seen: the recorded answer.
local state, open, reservation = KEYS[1], KEYS[2], KEYS[3]
local request_id, seq, counted = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[7])
local entry = redis.call('HMGET', reservation, 'state', 'key', 'in', 'in_s', 'bound', 'seq', 'wait', 'mu')
if entry[1] == 'ended' then return {'ended'} end
if not is_current(state, open, ARGV[2]) or not redis.call('ZSCORE', open, request_id) then return {'rebuild'} end

local now = clock(state, ARGV[1])
local second = second_of(now)
local key, input, bound, mu = entry[2], tonumber(entry[3]), tonumber(entry[5]), tonumber(entry[8])
redis.call('ZADD', open, now + tonumber(ARGV[8]), request_id)
local sums = {window_sum(KEYS[4], second), window_sum(KEYS[5], second)}
if counted >= 0 and counted < input then
  for i = 1, 2 do window_add(KEYS[3 + i], tonumber(entry[4]), second, counted - input) end
  redis.call('HSET', reservation, 'in', counted)
  count_open(state, key, 0, counted - input, 0)
  sums = {window_sum(KEYS[4], second), window_sum(KEYS[5], second)}
end
if seq <= tonumber(entry[6]) then return {'ok', bound, tonumber(entry[7]), mu} end

local limits = {tonumber(ARGV[5]), tonumber(ARGV[6])}
local tokens, cost = best_rung(9, limits, sums, 0)
local wait = 0
if tokens == 0 and #ARGV > 9 then
  for i = 1, 2 do
    if limits[i] >= 0 and sums[i] + 1 > limits[i] then
      wait = math.max(wait, until_free(KEYS[3 + i], now, sums[i] + 1 - limits[i]))
    end
  end
end
if tokens > 0 then
  for i = 1, 2 do window_add(KEYS[3 + i], second, second, tokens) end
  redis.call('HINCRBY', reservation, 'o' .. second, tokens)
  count_open(state, key, 0, tokens, cost)
end
bound, mu = bound + tokens, mu + cost
redis.call('HSET', reservation, 'bound', bound, 'seq', seq, 'wait', wait, 'mu', mu)
return {'ok', bound, wait, mu}
