-- Deletes every value of one region of an owner, and the owner's mark of it.
-- KEYS: 1 order, 2 sizes, 3 total (see put.lua), 4 names of the region (set), 5 owner (set of regions)
-- ARGV: 1 region, 2 prefix of entries
-- Answer: the number of deleted values.
local names = redis.call('SMEMBERS', KEYS[4])
for _, name in ipairs(names) do
  local member = ARGV[1] .. ':' .. name
  local size = redis.call('HGET', KEYS[2], member)
  redis.call('DEL', ARGV[2] .. member)
  redis.call('HDEL', KEYS[2], member)
  redis.call('ZREM', KEYS[1], member)
  if size then redis.call('DECRBY', KEYS[3], size) end
end
redis.call('DEL', KEYS[4])
redis.call('SREM', KEYS[5], ARGV[1])
return #names
