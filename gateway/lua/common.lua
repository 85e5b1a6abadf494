-- Put in front of every limiter script when it is loaded; not a script of its own.
--
-- state        hash: ep (epoch), hwm (time mark, ms), built (ms), run, tok, mu (open requests, their tokens, their
--              micro-units) of the tenant, and run:<key>, tok:<key>, mu:<key> of each api key
-- open         sorted set: request id -> expires_at in ms. A past one is suspect, and frees nothing
-- reservation  hash: state (open, ended), slot, key, in, in_s (prompt tokens still counted, and their second),
--              bound (output tokens granted), o<second> (those granted in it), seq, wait, mu; ended: a tombstone
-- window       hash: one field per second that took something, sum, lo (no field is older), hi (the newest that took)

local WINDOW_S = 60        -- the current second and 60 before it count, the oldest whole: never above the limit in 60 s
local TOMBSTONE_S = 300

-- Redis TIME in ms, kept monotone. Only tests hand a time in.
local function clock(state, given)
  local now
  if given ~= '' then
    now = tonumber(given)
  else
    local time = redis.call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  local mark = tonumber(redis.call('HGET', state, 'hwm') or '0')
  if mark >= now then return mark end
  redis.call('HSET', state, 'hwm', now)
  return now
end

local function second_of(now) return math.floor(now / 1000) end

-- False: the tenant is missing, from another epoch or partly lost, and has to be rebuilt first.
local function is_current(state, open, epoch)
  local known = redis.call('HMGET', state, 'ep', 'run')
  return known[1] == epoch and tonumber(known[2]) == redis.call('ZCARD', open)
end

-- What counts now. Expired seconds leave the sum here: at most 61 can be present.
local function window_sum(window, second)
  local head = redis.call('HMGET', window, 'sum', 'lo')
  if not head[1] then return 0 end
  local sum, lo, first = tonumber(head[1]), tonumber(head[2]), second - WINDOW_S
  if lo < first then
    for s = lo, math.min(first - 1, lo + WINDOW_S) do
      local amount = redis.call('HGET', window, s)
      if amount then
        sum = sum - tonumber(amount)
        redis.call('HDEL', window, s)
      end
    end
    redis.call('HSET', window, 'sum', sum, 'lo', first)
  end
  return sum
end

-- Adds (or, negative, gives back) an amount in the second it belongs to, if that second still counts.
local function window_add(window, second, now_second, amount)
  if amount == 0 or second < now_second - WINDOW_S then return end
  redis.call('HINCRBY', window, second, amount)
  redis.call('HINCRBY', window, 'sum', amount)
  redis.call('HSETNX', window, 'lo', now_second - WINDOW_S)
  if amount > 0 and second > tonumber(redis.call('HGET', window, 'hi') or '0') then
    redis.call('HSET', window, 'hi', second)
  end
  redis.call('EXPIRE', window, 2 * WINDOW_S)
end

-- ms until `excess` of what counts has expired; excess <= sum.
local function until_free(window, now, excess)
  local lo, last = tonumber(redis.call('HGET', window, 'lo') or '0'), second_of(now)
  local freed = 0
  for s = lo, last do
    freed = freed + tonumber(redis.call('HGET', window, s) or '0')
    if freed >= excess then return (s + WINDOW_S + 1) * 1000 - now end
  end
  return (last + WINDOW_S + 1) * 1000 - now
end

-- ms until nothing counts, at most: what was given back may have been the newest.
local function until_empty(window, now, sum)
  if sum <= 0 then return 0 end
  return (tonumber(redis.call('HGET', window, 'hi')) + WINDOW_S + 1) * 1000 - now
end

-- Open requests of tenant and key, with their tokens and micro-units.
local function count_open(state, key, requests, tokens, micro_units)
  -- + 0: Lua writes minus zero as "-0", which Redis does not take for an integer
  for field, amount in pairs({run = requests + 0, tok = tokens + 0, mu = micro_units + 0}) do
    redis.call('HINCRBY', state, field, amount)
    if redis.call('HINCRBY', state, field .. ':' .. key, amount) == 0 then
      redis.call('HDEL', state, field .. ':' .. key)
    end
  end
end

-- The largest rung of the ladder (tokens, cost, tokens, cost, ... from `first` on) that both windows allow.
local function best_rung(first, limits, sums, extra)
  for i = first, #ARGV, 2 do
    local tokens, fits = tonumber(ARGV[i]), true
    for w = 1, 2 do
      if limits[w] >= 0 and sums[w] + extra + tokens > limits[w] then fits = false end
    end
    if fits then return tokens, tonumber(ARGV[i + 1]) end
  end
  return 0, 0
end

-- Ends an open reservation: what was not used leaves the seconds it was taken in, and a tombstone stays.
local function finish(state, open, reservation, windows, request_id, now, used_input, used_output)
  local entry = {}
  local flat = redis.call('HGETALL', reservation)
  for i = 1, #flat, 2 do entry[flat[i]] = flat[i + 1] end
  local second, input, bound = second_of(now), tonumber(entry['in']), tonumber(entry.bound)
  local granted = {}
  for field, amount in pairs(entry) do
    local taken = string.match(field, '^o(%d+)$')
    if taken then granted[#granted + 1] = {tonumber(taken), tonumber(amount)} end
  end
  table.sort(granted, function(a, b) return a[1] > b[1] end)   -- the unspent tokens are the newest
  for _, window in ipairs(windows) do
    window_sum(window, second)
    window_add(window, tonumber(entry.in_s), second, -math.max(0, input - used_input))
    local unspent = math.max(0, bound - used_output)
    for _, grant in ipairs(granted) do
      local back = math.min(unspent, grant[2])
      window_add(window, grant[1], second, -back)
      unspent = unspent - back
    end
  end
  count_open(state, entry.key, -1, -(input + bound), -tonumber(entry.mu))
  redis.call('ZREM', open, request_id)
  redis.call('DEL', reservation)
  redis.call('HSET', reservation, 'state', 'ended')
  redis.call('EXPIRE', reservation, TOMBSTONE_S)
  return tonumber(entry.in_s)
end
