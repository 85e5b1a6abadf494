-- Stores a value with a time to live, within a bound of bytes. Expired values are deleted first, then the oldest ones.
-- Of the owner's regions a few are looked at, and those without a value are forgotten: more than one put adds.
-- KEYS: 1 order (sorted set: member by time), 2 sizes (hash: member -> bytes), 3 total (bytes), 4 owner (set of regions)
-- ARGV: 1 value, 2 region, 3 name, 4 time to live in s, 5 bound in bytes, 6 prefix of entries, 7 prefix of region sets
-- Answer: 1, or 0 for a value that is larger than the bound. Keys made of 6 and 7 are on the same server: no cluster.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local ttl, bound = tonumber(ARGV[4]), tonumber(ARGV[5])
local member = ARGV[2] .. ':' .. ARGV[3]

local function forget(gone)
  local size = redis.call('HGET', KEYS[2], gone)
  if not size then return end
  local region, name = string.match(gone, '^(.*):(.*)$')
  redis.call('DEL', ARGV[6] .. gone)
  redis.call('HDEL', KEYS[2], gone)
  redis.call('ZREM', KEYS[1], gone)
  redis.call('SREM', ARGV[7] .. region, name)
  redis.call('DECRBY', KEYS[3], size)
end

for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ttl, 'LIMIT', 0, 256)) do forget(gone) end
if #ARGV[1] > bound then return 0 end
forget(member)
while tonumber(redis.call('GET', KEYS[3]) or '0') + #ARGV[1] > bound do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not oldest then
    redis.call('SET', KEYS[3], 0)
    break
  end
  forget(oldest)
end
redis.call('SET', ARGV[6] .. member, ARGV[1], 'EX', ttl)
redis.call('ZADD', KEYS[1], now, member)
redis.call('HSET', KEYS[2], member, #ARGV[1])
redis.call('INCRBY', KEYS[3], #ARGV[1])
for _, set in ipairs({{ARGV[7] .. ARGV[2], ARGV[3]}, {KEYS[4], ARGV[2]}}) do
  redis.call('SADD', set[1], set[2])
  redis.call('EXPIRE', set[1], ttl + 60)
end
for _, region in ipairs(redis.call('SRANDMEMBER', KEYS[4], 4)) do
  if redis.call('EXISTS', ARGV[7] .. region) == 0 then redis.call('SREM', KEYS[4], region) end
end
return 1
