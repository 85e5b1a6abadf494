-- Put in front of every limiter script when it is loaded; not a script of its own.
--
-- state        hash: ep (epoch), hwm (time mark, ms), built (ms), n (open requests), mu (their micro-units);
--              of each place (api key, tenant, model, end user) run:<place>, tok:<place>: open requests, their tokens;
--              of each budget row (<budget>@<start of its period>) u: used, h: held, l: limit, k: hardness, v: version of
--              both; p:<budget>: the starts of its rows
-- open         sorted set: request id -> expires_at in ms. A past one is suspect, and frees nothing
-- reservation  hash: state (open, ended), slot, places, rows (of budgets), w (windows), in, in_s (prompt tokens still
--              counted, and their second), bound (output tokens granted), o<second> (those granted in it), seq, wait,
--              stop, mu; ended: a tombstone
-- window       hash: one field per bucket that took something, sum, lo (no field is older), hi (the newest that took).
--              Its key ends in :<unit>:<seconds of a bucket>

local BUCKETS = 60         -- the current bucket and 60 before it count, the oldest whole: never above the limit in 60
local TOMBSTONE_S = 300
local MAX_EXACT = 9007199254740991   -- 2^53 - 1: numbers here are doubles

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

-- Whether the state belongs to the epoch and lost nothing: a missing key never means that nothing was used.
local function is_current(state, open, epoch)
  local known = redis.call('HMGET', state, 'ep', 'n')
  return known[1] and tonumber(known[1]) == epoch and tonumber(known[2]) == redis.call('ZCARD', open)
end

-- With the epoch that is there, if any: one's own means damage.
local function rebuild(state)
  return {'rebuild', tonumber(redis.call('HGET', state, 'ep') or '-1')}
end

local function all_exact(numbers)
  for _, n in ipairs(numbers) do
    if n < 0 or n > MAX_EXACT or n % 1 ~= 0 then return false end
  end
  return true
end

-- Windows

local parts = {}   -- of the windows of this call, each taken apart once

local function parts_of(window)
  local known = parts[window]
  if not known then
    local place, unit, width = string.match(window, ':w:(.*):(%a+):(%d+)$')
    known = {unit, tonumber(width), place}
    parts[window] = known
  end
  return unpack(known)
end

local function place_of(window) return (select(3, parts_of(window))) end

-- What a request takes of a window of this unit.
local function taken(unit, requests, input, output)
  if unit == 'requests' then return requests end
  if unit == 'input' then return input end
  if unit == 'output' then return output end
  return input + output
end

-- What counts now, and the newest bucket. Expired buckets leave the sum here: at most 61 can be present.
local function window_sum(window, second)
  local head = redis.call('HMGET', window, 'sum', 'lo', 'hi')
  if not head[1] then return 0, 0 end
  local _, width = parts_of(window)
  local sum, lo, first = tonumber(head[1]), tonumber(head[2]), math.floor(second / width) - BUCKETS
  if lo < first then
    for b = lo, math.min(first - 1, lo + BUCKETS) do
      local amount = redis.call('HGET', window, b)
      if amount then
        sum = sum - tonumber(amount)
        redis.call('HDEL', window, b)
      end
    end
    redis.call('HSET', window, 'sum', sum, 'lo', first)
  end
  return sum, tonumber(head[3] or '0')
end

-- Adds (or, negative, gives back) an amount in the bucket of `at`, if that one still counts.
local function window_add(window, at, second, amount)
  local _, width = parts_of(window)
  local bucket, first = math.floor(at / width), math.floor(second / width) - BUCKETS
  if amount == 0 or bucket < first then return end
  redis.call('HINCRBY', window, bucket, amount)
  redis.call('HINCRBY', window, 'sum', amount)
  local ends = redis.call('HMGET', window, 'lo', 'hi')
  local is_newest = amount > 0 and bucket > tonumber(ends[2] or '0')
  if not ends[1] then redis.call('HSET', window, 'lo', first) end
  if is_newest then redis.call('HSET', window, 'hi', bucket) end
  -- Once for each bucket: twice as long as it counts.
  if is_newest or not ends[1] then redis.call('EXPIRE', window, 2 * BUCKETS * width) end
end

-- Makes a window that is not there out of {bucket, amount} pairs: as adding each, in two commands. A bucket that has
-- not come yet counts as the current one.
local function window_set(window, pairs_of, second)
  local _, width = parts_of(window)
  local last = math.floor(second / width)
  local first, hi, sum, amounts = last - BUCKETS, 0, 0, {}
  for _, pair in ipairs(pairs_of) do
    local bucket, amount = math.min(pair[1], last), pair[2]
    if bucket >= first and amount ~= 0 then
      amounts[bucket] = (amounts[bucket] or 0) + amount
      sum, hi = sum + amount, math.max(hi, bucket)
    end
  end
  if sum == 0 then return end
  local fields = {'sum', sum, 'lo', first, 'hi', hi}
  for bucket, amount in pairs(amounts) do
    fields[#fields + 1] = bucket
    fields[#fields + 1] = amount
  end
  redis.call('HSET', window, unpack(fields))
  redis.call('EXPIRE', window, 2 * BUCKETS * width)
end

local function end_of(bucket, width) return (bucket + BUCKETS + 1) * width * 1000 end

-- ms until `excess` of what counts has expired; excess <= sum.
local function until_free(window, now, excess)
  local _, width = parts_of(window)
  local lo, last = tonumber(redis.call('HGET', window, 'lo') or '0'), math.floor(second_of(now) / width)
  local freed = 0
  for b = lo, last do
    freed = freed + tonumber(redis.call('HGET', window, b) or '0')
    if freed >= excess then return end_of(b, width) - now end
  end
  return end_of(last, width) - now
end

-- ms until nothing counts, at most: what was given back may have been the newest.
local function until_empty(window, now, sum, newest)
  if sum <= 0 then return 0 end
  local _, width = parts_of(window)
  return end_of(newest, width) - now
end

-- Places

local function words(text)
  local found = {}
  for word in string.gmatch(text or '', '%S+') do found[#found + 1] = word end
  return found
end

-- What each place has open, as the state counts it: `run` requests, or their tokens, `tok`.
local function open_of(state, what, places)
  if #places == 0 then return {} end
  local fields = {}
  for i, place in ipairs(places) do fields[i] = what .. ':' .. place end
  local found = redis.call('HMGET', state, unpack(fields))
  for i = 1, #places do found[i] = tonumber(found[i] or '0') end
  return found
end

-- {sum, ms until empty, open tokens of its place} of the windows, in one list.
local function told(state, windows, now, sums, newest)
  local places, flat = {}, {}
  for i, window in ipairs(windows) do places[i] = place_of(window) end
  local tokens = open_of(state, 'tok', places)
  for i, window in ipairs(windows) do
    flat[#flat + 1] = sums[i]
    flat[#flat + 1] = until_empty(window, now, sums[i], newest[i])
    flat[#flat + 1] = tokens[i]
  end
  return flat
end

-- Adds to the open requests of each place, and to their tokens.
local function count_open(state, places, requests, tokens)
  for _, place in ipairs(places) do
    -- + 0: Lua writes minus zero as "-0", which Redis does not take for an integer
    for field, amount in pairs({['run:' .. place] = requests + 0, ['tok:' .. place] = tokens + 0}) do
      if redis.call('HINCRBY', state, field, amount) == 0 then redis.call('HDEL', state, field) end
    end
  end
  if requests ~= 0 then redis.call('HINCRBY', state, 'n', requests) end
end

-- Budgets: {row, budget, start, limit, hardness, version}; start -1: only a rebuild knows what was used

-- False: a row is missing that may have been charged to.
local function rows_exist(state, budgets)
  for _, b in ipairs(budgets) do
    if redis.call('HEXISTS', state, 'u:' .. b[1]) == 0 then
      if b[3] < tonumber(redis.call('HGET', state, 'built')) then return false end
      local starts = {b[1]}
      for _, row in ipairs(words(redis.call('HGET', state, 'p:' .. b[2]))) do
        if tonumber(redis.call('HGET', state, 'h:' .. row) or '0') ~= 0 then
          starts[#starts + 1] = row
        else
          redis.call('HDEL', state, 'u:' .. row, 'h:' .. row, 'l:' .. row, 'k:' .. row, 'v:' .. row)
        end
      end
      redis.call('HSET', state, 'u:' .. b[1], 0, 'h:' .. b[1], 0, 'p:' .. b[2], table.concat(starts, ' '))
    end
  end
  return true
end

-- Of limits read at different times the newest holds, whoever brings it.
local function learn_limits(state, budgets)
  for _, b in ipairs(budgets) do
    local limit, hardness, version = 'l:' .. b[1], 'k:' .. b[1], 'v:' .. b[1]
    local known = redis.call('HMGET', state, limit, hardness, version)
    local is_news = tonumber(known[1]) ~= b[4] or known[2] ~= b[5] or tonumber(known[3]) ~= b[6]
    if is_news and b[6] >= tonumber(known[3] or '-1') then
      redis.call('HSET', state, limit, b[4], hardness, b[5], version, b[6])
    end
  end
end

-- {row, hardness, what is left, used, held}
local function money_of(state, row)
  local known = redis.call('HMGET', state, 'u:' .. row, 'h:' .. row, 'l:' .. row, 'k:' .. row)
  local used, held = tonumber(known[1] or '0'), tonumber(known[2] or '0')
  return {row, known[4], tonumber(known[3] or '0') - used - held, used, held}
end

local function hold(state, rows, amount)
  if amount == 0 then return end
  for _, row in ipairs(rows) do redis.call('HINCRBY', state, 'h:' .. row, amount) end
  redis.call('HINCRBY', state, 'mu', amount)
end

-- The largest rung of the ladder ({tokens, cost}, largest first) that every window and every hard budget allows.
-- `limits`: {number of its window, limit, shadow} each; `sums` what counts in the windows; `input` and `cost`: what else
-- this call takes.
local function best_rung(ladder, windows, limits, sums, input, money, cost)
  for _, rung in ipairs(ladder) do
    local fits = true
    for _, l in ipairs(limits) do
      local unit = parts_of(windows[l[1]])
      if l[3] == 0 and sums[l[1]] + taken(unit, 0, input, rung[1]) > l[2] then fits = false end
    end
    for _, m in ipairs(money) do
      if m[2] == 'hard' and cost + rung[2] > m[3] then fits = false end
    end
    if fits then return rung[1], rung[2] end
  end
  return 0, 0
end

-- The script's KEYS from the fourth on.
local function windows_of(keys)
  local windows = {}
  for i = 4, #keys do windows[#windows + 1] = keys[i] end
  return windows
end

-- Ends an open reservation: what was not used leaves the buckets it was taken in, `cost` stays of the money that was
-- held, and a tombstone stays. `uncount`: it was no request either.
local function finish(state, open, reservation, windows, request_id, now, input_used, output_used, cost, uncount)
  local entry = {}
  local flat = redis.call('HGETALL', reservation)
  for i = 1, #flat, 2 do entry[flat[i]] = flat[i + 1] end
  local second, input, bound = second_of(now), tonumber(entry['in']), tonumber(entry.bound)
  local granted = {}
  for field, amount in pairs(entry) do
    local at = string.match(field, '^o(%d+)$')
    if at then granted[#granted + 1] = {tonumber(at), tonumber(amount)} end
  end
  table.sort(granted, function(a, b) return a[1] > b[1] end)   -- the unspent tokens are the newest
  for _, window in ipairs(windows) do
    local unit = parts_of(window)
    window_sum(window, second)
    local back = taken(unit, uncount and 1 or 0, math.max(0, input - input_used), 0)
    window_add(window, tonumber(entry.in_s), second, -back)
    local unspent = math.max(0, bound - output_used)
    for _, grant in ipairs(granted) do
      local part = math.min(unspent, grant[2])
      window_add(window, grant[1], second, -taken(unit, 0, 0, part))
      unspent = unspent - part
    end
  end
  local rows = words(entry.rows)
  hold(state, rows, -tonumber(entry.mu))
  if cost > 0 then
    for _, row in ipairs(rows) do redis.call('HINCRBY', state, 'u:' .. row, cost) end
  end
  count_open(state, words(entry.places), -1, -(input + bound))
  redis.call('ZREM', open, request_id)
  redis.call('DEL', reservation)
  redis.call('HSET', reservation, 'state', 'ended')
  redis.call('EXPIRE', reservation, TOMBSTONE_S)
end
