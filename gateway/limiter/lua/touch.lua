-- Moves the expiry of every request that a gateway still holds of one tenant.
-- KEYS  1 state  2 open
-- ARGV  1 time ('' outside tests)  2 JSON: epoch, term in ms, ids
-- Answer {'rebuild', epoch} or {'ok', number of ids that are not open here}
-- A repeated call is harmless.
local state, open = KEYS[1], KEYS[2]
local ask = cjson.decode(ARGV[2])
if not is_current(state, open, ask.epoch) then return rebuild(state) end
local now = clock(state, ARGV[1])
if not now then return rebuild(state) end
local expires_at, missing = now + ask.term, 0
for _, id in ipairs(ask.ids) do
  if redis.call('ZSCORE', open, id) then
    redis.call('ZADD', open, expires_at, id)
  else
    missing = missing + 1
  end
end
return {'ok', missing}
