-- Makes a tenant's state under an epoch and puts one gateway's open requests into it, from that gateway's memory.
-- KEYS  1 state  2 open  3.. for each request: reservation, key requests, key tokens, tenant requests, tenant tokens
-- ARGV  1 time ('' but in tests)  2 epoch  3 slot  4 term in ms
--       5.. for each request: id, api key id, prompt tokens, bound, lease_seq, micro-units, second of its admission
-- Answer {'ok'}
-- Repeated: no effect; a request that is open here already, or has ended, is left alone.
local state, open, epoch = KEYS[1], KEYS[2], ARGV[2]
if not is_current(state, open, epoch) then
  local mark = redis.call('HGET', state, 'hwm')
  redis.call('DEL', state, open)
  redis.call('HSET', state, 'ep', epoch, 'run', 0, 'tok', 0, 'mu', 0, 'hwm', mark or 0)
  redis.call('HSET', state, 'built', clock(state, ARGV[1]))
end
local now = clock(state, ARGV[1])
local second = second_of(now)
for n = 0, (#ARGV - 4) / 7 - 1 do
  local a, k = 5 + 7 * n, 3 + 5 * n
  local id, key, input, bound = ARGV[a], ARGV[a + 1], tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  local known = redis.call('HGET', KEYS[k], 'state')
  if known ~= 'ended' and not redis.call('ZSCORE', open, id) then
    if not known then   -- lost with its windows: its tokens count from now, against the tenant
      for i = 1, 4 do window_sum(KEYS[k + i], second) end
      window_add(KEYS[k + 1], tonumber(ARGV[a + 6]), second, 1)
      window_add(KEYS[k + 3], tonumber(ARGV[a + 6]), second, 1)
      window_add(KEYS[k + 2], second, second, input + bound)
      window_add(KEYS[k + 4], second, second, input + bound)
      redis.call('HSET', KEYS[k], 'in_s', second, 'o' .. second, bound, 'wait', 0)
    end
    redis.call('HSET', KEYS[k], 'state', 'open', 'slot', ARGV[3], 'key', key, 'in', input, 'bound', bound,
      'seq', ARGV[a + 4], 'mu', ARGV[a + 5])
    count_open(state, key, 1, input + bound, tonumber(ARGV[a + 5]))
    redis.call('ZADD', open, now + tonumber(ARGV[4]), id)
  end
end
return {'ok'}
