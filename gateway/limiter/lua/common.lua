-- Put in front of every limiter script when it is loaded; not a script of its own. What a script returns goes out as
-- one MessagePack value: a reply of many parts takes a client many times as long to read.
--
-- state        hash: ep (epoch), hwm (time mark, ms), built (ms, by the gateways' clock), n (open requests), mu (their micro-units);
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
local STEP_MS = 60000       -- while the clock stands still after a smaller step back, nobody waits longer than a window
local MAX_EXACT = 9007199254740991   -- 2^53 - 1: numbers here are doubles

-- Redis TIME in ms, kept monotone over small steps; nil: it has stepped back further, so what was counted until now lies
-- in a future that may be far off, and the state is to be made anew. Only tests hand a time in.
local function clock(state, given)
  local now
  if given ~= '' then
    now = tonumber(given)
  else
    local time = redis.call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  local mark = tonumber(redis.call('HGET', state, 'hwm') or '0')
  if mark - now > STEP_MS then return nil end
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

-- `prefix` .. name, of each name.
local function prefixed(prefix, names)
  local found = {}
  for i, name in ipairs(names) do found[i] = prefix .. name end
  return found
end

-- Integers of a hash in the order of `fields`; one that is not there is 0.
local function numbers_of(key, fields)
  if #fields == 0 then return {} end
  local numbers = redis.call('HMGET', key, unpack(fields))
  for i = 1, #fields do numbers[i] = tonumber(numbers[i] or '0') end
  return numbers
end

-- Sets field, value, field, value, ... of a hash; Lua hands on only so many values at once.
local function set_fields(key, fields)
  for i = 1, #fields, 1000 do redis.call('HSET', key, unpack(fields, i, math.min(i + 999, #fields))) end
end

-- Windows

-- What a request takes of a window of this unit.
local function taken(unit, requests, input, output)
  if unit == 'requests' then return requests end
  if unit == 'input' then return input end
  if unit == 'output' then return output end
  return input + output
end

-- A window as it counts now: key, name (place:unit:width), place, unit, width, first and last (the oldest and the newest
-- bucket that count), sum, lo (false: there is none yet), hi. Expired buckets leave it here: at most 61 can be present.
local function read_window(key, second)
  local name = string.match(key, ':w:(.*)$')
  local place, unit, width = string.match(name, '^(.*):(%a+):(%d+)$')
  width = tonumber(width)
  local last = math.floor(second / width)
  local first, head = last - BUCKETS, redis.call('HMGET', key, 'sum', 'lo', 'hi')
  local window = {
    key = key, name = name, place = place, unit = unit, width = width, first = first, last = last,
    sum = tonumber(head[1] or '0'), lo = head[2] and tonumber(head[2]), hi = tonumber(head[3] or '0'),
  }
  if window.lo and window.lo < first then
    local expired = {}
    for bucket = window.lo, math.min(first - 1, window.lo + BUCKETS) do expired[#expired + 1] = bucket end
    for _, amount in ipairs(numbers_of(key, expired)) do window.sum = window.sum - amount end
    redis.call('HDEL', key, unpack(expired))
    window.lo = first
    redis.call('HSET', key, 'sum', window.sum, 'lo', first)
  end
  return window
end

-- The script's KEYS from the fourth on.
local function windows_of(keys, second)
  local windows = {}
  for i = 4, #keys do windows[#windows + 1] = read_window(keys[i], second) end
  return windows
end

-- Adds (or, negative, gives back) an amount in the bucket of `at`, if that one still counts.
local function window_add(window, at, amount)
  local bucket = math.floor(at / window.width)
  if amount == 0 or bucket < window.first then return end
  redis.call('HINCRBY', window.key, bucket, amount)
  window.sum, window.lo = window.sum + amount, window.lo or window.first
  if amount > 0 then window.hi = math.max(window.hi, bucket) end
  redis.call('HSET', window.key, 'sum', window.sum, 'lo', window.lo, 'hi', window.hi)
  redis.call('EXPIRE', window.key, 2 * BUCKETS * window.width)
end

-- Makes a window that is not there out of {bucket, amount} pairs: as adding each, in two commands. A bucket that has
-- not come yet counts as the current one.
local function window_set(key, pairs_of, second)
  local width = tonumber(string.match(key, ':(%d+)$'))
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
  redis.call('HSET', key, unpack(fields))
  redis.call('EXPIRE', key, 2 * BUCKETS * width)
end

local function end_of(bucket, width) return (bucket + BUCKETS + 1) * width * 1000 end

-- ms until `excess` of what counts has expired; excess <= sum.
local function until_free(window, now, excess)
  local freed, buckets = 0, {}
  for bucket = window.lo or window.last, window.last do buckets[#buckets + 1] = bucket end
  for i, amount in ipairs(numbers_of(window.key, buckets)) do
    freed = freed + amount
    if freed >= excess then return end_of(buckets[i], window.width) - now end
  end
  return end_of(window.last, window.width) - now
end

-- {sum, ms until nothing counts, open tokens of its place} of the windows, in one list. Until then at most: what was
-- given back may have been the newest.
local function sums_of(state, windows, now)
  local places, answer = {}, {}
  for i, window in ipairs(windows) do places[i] = window.place end
  local tokens = numbers_of(state, prefixed('tok:', places))
  for i, window in ipairs(windows) do
    answer[3 * i - 2] = window.sum
    answer[3 * i - 1] = window.sum > 0 and end_of(window.hi, window.width) - now or 0
    answer[3 * i] = tokens[i]
  end
  return answer
end

-- Places

local function words(text)
  local found = {}
  for word in string.gmatch(text or '', '%S+') do found[#found + 1] = word end
  return found
end

-- Open requests of each place, with their tokens.
local function count_open(state, places, requests, tokens)
  local fields, changed, gone = {'n'}, {}, {}
  for _, place in ipairs(places) do
    fields[#fields + 1] = 'run:' .. place
    fields[#fields + 1] = 'tok:' .. place
  end
  for i, known in ipairs(numbers_of(state, fields)) do
    local amount = known + (fields[i]:sub(1, 4) == 'tok:' and tokens or requests)
    if amount == 0 and i > 1 then
      gone[#gone + 1] = fields[i]
    else
      changed[#changed + 1] = fields[i]
      changed[#changed + 1] = amount
    end
  end
  redis.call('HSET', state, unpack(changed))
  if #gone > 0 then redis.call('HDEL', state, unpack(gone)) end
end

-- Budgets: {row, budget, start, limit, hardness, version}; start -1: only a rebuild knows what was used

-- False: a row is missing that may have been charged to.
local function rows_exist(state, budgets)
  local fields = {'built'}
  for _, b in ipairs(budgets) do fields[#fields + 1] = 'u:' .. b[1] end
  local known = redis.call('HMGET', state, unpack(fields))
  for i, b in ipairs(budgets) do
    if not known[i + 1] then
      if b[3] < tonumber(known[1]) then return false end
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
  if #budgets == 0 then return end
  local fields = {}
  for _, b in ipairs(budgets) do
    fields[#fields + 1] = 'v:' .. b[1]
    fields[#fields + 1] = 'l:' .. b[1]
    fields[#fields + 1] = 'k:' .. b[1]
  end
  local known = redis.call('HMGET', state, unpack(fields))
  for i, b in ipairs(budgets) do
    local version, limit, hardness = tonumber(known[3 * i - 2] or '-1'), known[3 * i - 1], known[3 * i]
    local is_new = b[6] > version or tonumber(limit) ~= b[4] or hardness ~= b[5]
    if b[6] >= version and is_new then
      redis.call('HSET', state, 'l:' .. b[1], b[4], 'k:' .. b[1], b[5], 'v:' .. b[1], b[6])
    end
  end
end

-- {row, hardness, what is left, used, held} of each row.
local function money_of(state, rows)
  if #rows == 0 then return {} end
  local fields, money = {}, {}
  for _, row in ipairs(rows) do
    for _, kind in ipairs({'u:', 'h:', 'l:', 'k:'}) do fields[#fields + 1] = kind .. row end
  end
  local known = redis.call('HMGET', state, unpack(fields))
  for i, row in ipairs(rows) do
    local at = 4 * i - 3
    local used, held = tonumber(known[at] or '0'), tonumber(known[at + 1] or '0')
    money[i] = {row, known[at + 3], tonumber(known[at + 2] or '0') - used - held, used, held}
  end
  return money
end

local function hold(state, rows, amount)
  if amount == 0 then return end
  for _, row in ipairs(rows) do redis.call('HINCRBY', state, 'h:' .. row, amount) end
  redis.call('HINCRBY', state, 'mu', amount)
end

-- The largest rung of the ladder ({tokens, cost}, largest first) that every window and every hard budget allows.
-- `limits`: {number of its window, limit, shadow} each; `input` and `cost`: what else this call takes.
local function best_rung(ladder, windows, limits, input, money, cost)
  for _, rung in ipairs(ladder) do
    local fits = true
    for _, l in ipairs(limits) do
      local window = windows[l[1]]
      if l[3] == 0 and window.sum + taken(window.unit, 0, input, rung[1]) > l[2] then fits = false end
    end
    for _, m in ipairs(money) do
      if m[2] == 'hard' and cost + rung[2] > m[3] then fits = false end
    end
    if fits then return rung[1], rung[2] end
  end
  return 0, 0
end

-- Ends an open reservation: what was not used leaves the buckets it was taken in, `cost` stays of the money that was
-- held, and a tombstone stays. `uncount`: it was no request either.
local function finish(state, open, reservation, windows, request_id, input_used, output_used, cost, uncount)
  local entry = {}
  local flat = redis.call('HGETALL', reservation)
  for i = 1, #flat, 2 do entry[flat[i]] = flat[i + 1] end
  local input, bound = tonumber(entry['in']), tonumber(entry.bound)
  local granted = {}
  for field, amount in pairs(entry) do
    local at = string.match(field, '^o(%d+)$')
    if at then granted[#granted + 1] = {tonumber(at), tonumber(amount)} end
  end
  table.sort(granted, function(a, b) return a[1] > b[1] end)   -- the unspent tokens are the newest
  for _, window in ipairs(windows) do
    local back = taken(window.unit, uncount and 1 or 0, math.max(0, input - input_used), 0)
    window_add(window, tonumber(entry.in_s), -back)
    local unspent = math.max(0, bound - output_used)
    for _, grant in ipairs(granted) do
      local part = math.min(unspent, grant[2])
      window_add(window, grant[1], -taken(window.unit, 0, 0, part))
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
