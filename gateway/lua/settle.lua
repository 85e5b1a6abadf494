-- Ends a request that was charged: the unspent rest and the concurrency permit go back.
-- KEYS  1 state  2 open  3 reservation  4 key tokens  5 tenant tokens
-- ARGV  1 time ('' but in tests)  2 epoch  3 request id  4 cost in micro-units (budgets will move it from reserved to
--       used)  5 prompt tokens that count (written + uncached)  6 output tokens
-- Answer {'rebuild'} (the tenant's state is lost, nothing to give back), {'none'} or {'ok'}
-- Repeated, or without an open reservation: no effect.
local state, open, reservation = KEYS[1], KEYS[2], KEYS[3]
if not is_current(state, open, ARGV[2]) then return {'rebuild'} end
if not redis.call('ZSCORE', open, ARGV[3]) then return {'none'} end
local now = clock(state, ARGV[1])
finish(state, open, reservation, {KEYS[4], KEYS[5]}, ARGV[3], now, tonumber(ARGV[5]), tonumber(ARGV[6]))
return {'ok'}
