-- Moves the expiry of every request that a gateway still holds of one tenant.
-- KEYS  1 state  2 open
-- ARGV  1 time ('' but in tests)  2 epoch  3 term in ms  4.. request ids
-- Answer {'rebuild'}, or {'ok', ids that are not open here ...}
-- Repeated: harmless.
local state, open = KEYS[1], KEYS[2]
if not is_current(state, open, ARGV[2]) then return {'rebuild'} end
local expires_at = clock(state, ARGV[1]) + tonumber(ARGV[3])
local answer = {'ok'}
for i = 4, #ARGV do
  if redis.call('ZSCORE', open, ARGV[i]) then
    redis.call('ZADD', open, expires_at, ARGV[i])
  else
    answer[#answer + 1] = ARGV[i]
  end
end
return answer
