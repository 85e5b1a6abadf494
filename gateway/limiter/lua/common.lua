-- Shared functions of the limiter scripts. This text is put in front of every script when it is loaded; it is no script
-- of its own. A script's result is sent as one MessagePack value, because a client takes many times as long to read a
-- reply of many parts.
--
-- state        hash: ep (epoch), hwm (time mark, ms), built (ms, by the gateways' clock), n (open requests),
--              mu (their micro-units);
--              for each place (API key, tenant, model, end user) run:<place>: open requests, tok:<place>: their tokens;
--              for each budget row (<budget>@<start of its period>) u: used, h: held, l: limit, k: hardness, v: version
--              of limit and hardness; p:<budget>: the starts of its rows
-- open         sorted set: request id -> expires_at in ms. A request past this time is suspect, and frees nothing
-- reservation  hash: state (open, ended), slot, places, rows (of budgets), w (windows), in, in_s (prompt tokens still
--              counted, and their second), bound (output tokens granted), o<second> (those granted in that second),
--              seq, wait, stop, mu. An ended reservation is a tombstone
-- window       hash: one field per bucket with an amount, sum, lo (no field is older), hi (the newest with one).
--              Its key ends in :<unit>:<seconds of a bucket>
-- shadow       hash: <day> <name of a limit in shadow mode> -> the requests of that day that it would have refused. No
--              decision reads it, so a state that is rebuilt leaves it alone

local BUCKETS = 60         -- the current bucket and 60 before it count, so the limit holds over any 60
local TOMBSTONE_S = 300
local STEP_MS = 60000       -- after a smaller step back the clock stands still, for a window at most
local MAX_EXACT = 9007199254740991   -- 2^53 - 1: numbers here are doubles
local SHADOW_DAYS = 7       -- today and the days before it, UTC, of which refusals in shadow mode are told

-- Returns Redis TIME in ms, kept monotone over small steps. Returns nil if it has stepped back further: the counted
-- amounts then lie in a future that may be far off, and the state must be rebuilt. Only tests pass a time.
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

-- Returns whether the state belongs to the epoch and lost nothing: a missing key never means that nothing was used.
local function is_current(state, open, epoch)
  local known = redis.call('HMGET', state, 'ep', 'n')
  return known[1] and tonumber(known[1]) == epoch and tonumber(known[2]) == redis.call('ZCARD', open)
end

-- Returns the answer 'rebuild' with the state's epoch, or -1. If this is the caller's own epoch, the state is damaged.
local function rebuild(state)
  return {'rebuild', tonumber(redis.call('HGET', state, 'ep') or '-1')}
end

local function all_exact(numbers)
  for _, n in ipairs(numbers) do
    if n < 0 or n > MAX_EXACT or n % 1 ~= 0 then return false end
  end
  return true
end

-- Returns `prefix` .. name for each name.
local function prefixed(prefix, names)
  local found = {}
  for i, name in ipairs(names) do found[i] = prefix .. name end
  return found
end

-- Returns integers of a hash in the order of `fields`; a missing field is 0.
local function numbers_of(key, fields)
  if #fields == 0 then return {} end
  local numbers = redis.call('HMGET', key, unpack(fields))
  for i = 1, #fields do numbers[i] = tonumber(numbers[i] or '0') end
  return numbers
end

-- Sets field, value, field, value, ... of a hash, in parts: Lua can pass only a limited number of values at once.
local function set_fields(key, fields)
  for i = 1, #fields, 1000 do redis.call('HSET', key, unpack(fields, i, math.min(i + 999, #fields))) end
end

-- Windows

-- Returns the amount that a request takes of a window of this unit.
local function taken(unit, requests, input, output)
  if unit == 'requests' then return requests end
  if unit == 'input' then return input end
  if unit == 'output' then return output end
  return input + output
end

-- Returns a window as it counts now: key, name (place:unit:width), place, unit, width, first and last (the oldest and
-- the newest bucket that count), sum, lo (false if there is none yet), hi. Expired buckets are deleted here: at most 61
-- can be present.
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

-- Returns the windows of the script's KEYS from the fourth on.
local function windows_of(keys, second)
  local windows = {}
  for i = 4, #keys do windows[#windows + 1] = read_window(keys[i], second) end
  return windows
end

-- Adds an amount to the bucket of `at`, if that bucket still counts. A negative amount is given back.
local function window_add(window, at, amount)
  local bucket = math.floor(at / window.width)
  if amount == 0 or bucket < window.first then return end
  redis.call('HINCRBY', window.key, bucket, amount)
  window.sum, window.lo = window.sum + amount, window.lo or window.first
  if amount > 0 then window.hi = math.max(window.hi, bucket) end
  redis.call('HSET', window.key, 'sum', window.sum, 'lo', window.lo, 'hi', window.hi)
  redis.call('EXPIRE', window.key, 2 * BUCKETS * window.width)
end

-- Makes a missing window from {bucket, amount} pairs. The result is that of adding each, but with two commands. A
-- bucket in the future counts as the current one.
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

-- Returns the ms until an amount of `excess` has expired; excess <= sum.
local function until_free(window, now, excess)
  local freed, buckets = 0, {}
  for bucket = window.lo or window.last, window.last do buckets[#buckets + 1] = bucket end
  for i, amount in ipairs(numbers_of(window.key, buckets)) do
    freed = freed + amount
    if freed >= excess then return end_of(buckets[i], window.width) - now end
  end
  return end_of(window.last, window.width) - now
end

-- Returns {sum, ms until nothing counts, open tokens of its place} of the windows, in one list. The ms are an upper
-- bound: the newest amount may have been given back.
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

-- Adds to the open requests of each place, and to their tokens.
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

-- Budgets: {row, budget, start, limit, hardness, version}; at start -1 only a rebuild knows the used amount

local function start_of(row) return tonumber(string.match(row, '@(%d+)$')) end

-- Makes missing rows. Returns false if a missing row may have been charged to. Of the budget's other rows those that hold
-- nothing go, but for the one of the period before and those of later periods: a request that comes late, or from a
-- gateway whose clock is behind, must find its row with what is used, and must not empty the present one.
local function rows_exist(state, budgets)
  local fields = {'built'}
  for _, b in ipairs(budgets) do fields[#fields + 1] = 'u:' .. b[1] end
  local known = redis.call('HMGET', state, unpack(fields))
  for i, b in ipairs(budgets) do
    if not known[i + 1] then
      if b[3] < tonumber(known[1]) then return false end
      local starts, rows, before = {b[1]}, words(redis.call('HGET', state, 'p:' .. b[2])), -1
      for _, row in ipairs(rows) do
        local start = start_of(row)
        if start < b[3] and start > before then before = start end
      end
      for _, row in ipairs(rows) do
        if start_of(row) >= before or tonumber(redis.call('HGET', state, 'h:' .. row) or '0') ~= 0 then
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

-- Stores limits. If limits were read at different times, the newest version holds, whichever call brings it.
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

-- Returns {row, hardness, remaining amount, used, held} of each row.
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

-- Returns the largest rung of the ladder ({tokens, cost}, largest first) that every window and every hard budget
-- allows. Each of `limits` is {number of its window, limit, shadow}. This call also takes `input` and `cost`.
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

-- Ends an open reservation. Unused amounts are given back to the buckets they were taken from, `cost` of the held money
-- is charged, and a tombstone stays. With `uncount` it does not count as a request either.
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

-- Refusals in shadow mode

local function day_of(now) return math.floor(now / 86400000) end

-- Counts a request that the limits of these names would have refused. Days that are no longer told are deleted when a
-- limit counts for the first time on a day.
local function count_shadowed(key, names, now)
  local day, is_first = day_of(now), false
  for _, name in ipairs(names) do
    if redis.call('HINCRBY', key, day .. ' ' .. name, 1) == 1 then is_first = true end
  end
  if #names > 0 then redis.call('EXPIRE', key, SHADOW_DAYS * 86400) end
  if not is_first then return end
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if tonumber(string.match(field, '^%d+')) <= day - SHADOW_DAYS then redis.call('HDEL', key, field) end
  end
end

-- Returns the number of requests of the last days that each of these limits would have refused.
local function shadowed_of(key, names, now)
  local answer, day = {}, day_of(now)
  for i, name in ipairs(names) do
    local fields, sum = {}, 0
    for before = 0, SHADOW_DAYS - 1 do fields[#fields + 1] = (day - before) .. ' ' .. name end
    for _, number in ipairs(numbers_of(key, fields)) do sum = sum + number end
    answer[i] = sum
  end
  return answer
end
