-- Ends a request that is not charged: all its tokens and money and the concurrency permit go back.
-- KEYS  1 state  2 open  3 reservation  4.. windows
-- ARGV  1 time ('' outside tests)  2 JSON: epoch, id, never_admitted (it does not count as a request)
-- Answer {'rebuild', epoch}, {'none'} or {'ok'}
-- A repeated call has no effect. A call before its `reserve` (calls may overtake each other) leaves a tombstone, so
-- that reserve takes nothing.
local state, open, reservation = KEYS[1], KEYS[2], KEYS[3]
local ask = cjson.decode(ARGV[2])
if not is_current(state, open, ask.epoch) then return rebuild(state) end
local now = clock(state, ARGV[1])
if not now then return rebuild(state) end
if not redis.call('ZSCORE', open, ask.id) then
  redis.call('DEL', reservation)
  redis.call('HSET', reservation, 'state', 'ended')
  redis.call('EXPIRE', reservation, TOMBSTONE_S)
  return {'none'}
end
finish(state, open, reservation, windows_of(KEYS, second_of(now)), ask.id, 0, 0, 0, ask.never_admitted)
return {'ok'}
