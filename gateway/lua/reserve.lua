-- Admits a request at every level or at none: the prompt and the largest affordable first lease.
-- KEYS  1 state  2 open  3 reservation  4 key requests  5 key tokens  6 tenant requests  7 tenant tokens
-- ARGV  1 time ('' but in tests)  2 epoch  3 request id  4 slot  5 api key id
--       6-8 requests, tokens per minute, concurrency of the key (-1: none)  9-11 of the tenant
--       12 prompt tokens  13 prompt cost  14 term in ms  15.. ladder: tokens, cost, largest first (none: no output)
-- Answer {'rebuild'} or {'ended'}, or
--   {'ok' | 'refused', now, bound, micro-units reserved, failing limit (1-6 as in ARGV 6-11's checking order),
--    ms until it would fit (-1: never), then sum and ms until empty of KEYS 4-7, running and open tokens of key, tenant}
-- Repeated: the same bound, nothing taken twice.
local state, open, reservation = KEYS[1], KEYS[2], KEYS[3]
local epoch, request_id, key = ARGV[2], ARGV[3], ARGV[5]
if not is_current(state, open, epoch) then return {'rebuild'} end
local known = redis.call('HMGET', reservation, 'state', 'bound', 'mu')
if known[1] == 'ended' then return {'ended'} end

local now = clock(state, ARGV[1])
local second = second_of(now)
local limits = {}
for i = 1, 6 do limits[i] = tonumber(ARGV[5 + i]) end   -- key rpm, tpm, concurrency, tenant rpm, tpm, concurrency
local prompt, first_rung = tonumber(ARGV[12]), 15

local function report(status, bound, mu, failing, wait)
  local answer = {status, now, bound, mu, failing, wait}
  for i = 4, 7 do
    local sum = window_sum(KEYS[i], second)
    answer[#answer + 1] = sum
    answer[#answer + 1] = until_empty(KEYS[i], now, sum)
  end
  local counts = redis.call('HMGET', state, 'run:' .. key, 'tok:' .. key, 'run', 'tok')
  for i = 1, 4 do answer[#answer + 1] = tonumber(counts[i] or '0') end
  return answer
end

if known[1] == 'open' then return report('ok', tonumber(known[2]), tonumber(known[3]), 0, 0) end

local least = prompt
if #ARGV > first_rung then least = prompt + tonumber(ARGV[#ARGV - 1]) end
local failing, wait = 0, 0
local function refuse(number, ms)
  if failing == 0 then failing = number end
  if ms < 0 or wait < 0 then wait = -1 else wait = math.max(wait, ms) end
end
local sums = {}
for i, check in ipairs({{1, 4, 1}, {2, 5, least}, {4, 6, 1}, {5, 7, least}}) do
  local number, window, need = check[1], KEYS[check[2]], check[3]
  sums[i] = window_sum(window, second)
  local limit = limits[number]
  if limit >= 0 and sums[i] + need > limit then
    if need > limit then refuse(number, -1) else refuse(number, until_free(window, now, sums[i] + need - limit)) end
  end
end
local running = redis.call('HMGET', state, 'run:' .. key, 'run')
for i, number in ipairs({3, 6}) do
  if limits[number] >= 0 and tonumber(running[i] or '0') >= limits[number] then
    if limits[number] == 0 then refuse(number, -1) else refuse(number, 1000) end   -- nobody knows when one ends
  end
end
if failing > 0 then return report('refused', 0, 0, failing, wait) end

local bound, cost = best_rung(first_rung, {limits[2], limits[5]}, {sums[2], sums[4]}, prompt)
local mu = tonumber(ARGV[13]) + cost
window_add(KEYS[4], second, second, 1)
window_add(KEYS[6], second, second, 1)
window_add(KEYS[5], second, second, prompt + bound)
window_add(KEYS[7], second, second, prompt + bound)
redis.call('HSET', reservation, 'state', 'open', 'slot', ARGV[4], 'key', key, 'in', prompt, 'in_s', second,
  'bound', bound, 'o' .. second, bound, 'seq', 0, 'wait', 0, 'mu', mu)
count_open(state, key, 1, prompt + bound, mu)
redis.call('ZADD', open, now + tonumber(ARGV[14]), request_id)
return report('ok', bound, mu, 0, 0)
