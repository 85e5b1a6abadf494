-- Ends a request that is not charged: all its tokens and the concurrency permit go back.
-- KEYS  1 state  2 open  3 reservation  4 key tokens  5 tenant tokens  6 key requests  7 tenant requests
-- ARGV  1 time ('' but in tests)  2 epoch  3 request id  4 '1': it was never admitted, so it does not count as a request
-- Answer {'rebuild'} (the tenant's state is lost, nothing to give back), {'none'} or {'ok'}
-- Repeated: no effect. Before its `reserve` (calls may overtake each other): a tombstone, so that reserve takes nothing.
local state, open, reservation = KEYS[1], KEYS[2], KEYS[3]
if not is_current(state, open, ARGV[2]) then return {'rebuild'} end
local now = clock(state, ARGV[1])
if not redis.call('ZSCORE', open, ARGV[3]) then
  redis.call('DEL', reservation)
  redis.call('HSET', reservation, 'state', 'ended')
  redis.call('EXPIRE', reservation, TOMBSTONE_S)
  return {'none'}
end
local taken = finish(state, open, reservation, {KEYS[4], KEYS[5]}, ARGV[3], now, 0, 0)
if ARGV[4] == '1' then
  for i = 6, 7 do
    window_sum(KEYS[i], second_of(now))
    window_add(KEYS[i], taken, second_of(now), -1)
  end
end
return {'ok'}
