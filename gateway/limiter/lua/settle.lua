-- Ends a request that was charged: its cost moves from held to used, the rest and the concurrency permit go back.
-- KEYS  1 state  2 open  3 reservation  4.. windows
-- ARGV  1 time ('' outside tests)  2 JSON: epoch, id, cost in micro-units, input (prompt tokens that count: written +
--       uncached), output tokens
-- Answer {'rebuild', epoch}, {'none'}, {'inexact'} or {'ok'}
-- A repeated call, or one without an open reservation, has no effect.
local state, open, reservation = KEYS[1], KEYS[2], KEYS[3]
local ask = cjson.decode(ARGV[2])
if not is_current(state, open, ask.epoch) then return rebuild(state) end
if not redis.call('ZSCORE', open, ask.id) then return {'none'} end
if not all_exact({ask.cost, ask.input, ask.output}) then return {'inexact'} end
local now = clock(state, ARGV[1])
if not now then return rebuild(state) end
local windows = windows_of(KEYS, second_of(now))
finish(state, open, reservation, windows, ask.id, ask.input, ask.output, ask.cost, false)
return {'ok'}
