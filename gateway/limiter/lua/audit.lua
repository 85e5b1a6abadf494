-- Reads a tenant's budget rows for comparison with the books; reserves nothing.
-- KEYS  1 state  2 open  3.. the reservations in open
-- ARGV  1 time (unused)  2 JSON: rows (of budgets)
-- Answer {'again'} if open changed since it was read; {'none'} if there is no state; or
--        {'ok', epoch, {used, held, sum held by open reservations} of the rows; used is -1 for a missing row}
local state, open = KEYS[1], KEYS[2]
local ask = cjson.decode(ARGV[2])
local epoch = redis.call('HGET', state, 'ep')
if not epoch then return {'none'} end
if redis.call('ZCARD', open) ~= #KEYS - 2 then return {'again'} end
local outstanding = {}
for i = 3, #KEYS do
  local known = redis.call('HMGET', KEYS[i], 'state', 'rows', 'mu')
  if known[1] ~= 'open' then return {'again'} end
  for _, row in ipairs(words(known[2])) do outstanding[row] = (outstanding[row] or 0) + tonumber(known[3]) end
end
local answer = {'ok', tonumber(epoch)}
for _, row in ipairs(ask.rows) do
  local known = redis.call('HMGET', state, 'u:' .. row, 'h:' .. row)
  answer[#answer + 1] = tonumber(known[1] or '-1')
  answer[#answer + 1] = tonumber(known[2] or '0')
  answer[#answer + 1] = outstanding[row] or 0
end
return answer
