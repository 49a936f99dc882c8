"""What Redis does in one piece, between other requests: Lua, run by the Redis server."""

# KEYS: run, seatings, live, number of prekeys.
# ARGV: link, asked, now, at least, at most, prefix of stocks, candidates...
SEAT = """
local before = redis.call('HGET', KEYS[2], ARGV[1])
if before then return {'seated', before} end
local highest = redis.call('HGET', KEYS[1], 'highest')
if not highest then return {'unknown'} end
if tonumber(ARGV[1]) <= tonumber(highest) then return {'late', highest} end
local chosen = {}
for place = 7, #ARGV do
    if #chosen >= tonumber(ARGV[5]) then break end
    local one = ARGV[place]
    local expires = redis.call('ZSCORE', KEYS[3], one)
    if expires and tonumber(expires) > tonumber(ARGV[3]) and redis.call('LLEN', ARGV[6] .. one) > 0 then
        chosen[#chosen + 1] = one
    end
end
if #chosen < tonumber(ARGV[4]) then return {'few', tostring(#chosen)} end
local parts = {ARGV[2]}
for _, one in ipairs(chosen) do
    parts[#parts + 1] = one
    parts[#parts + 1] = redis.call('LPOP', ARGV[6] .. one)
end
redis.call('DECRBY', KEYS[4], #chosen)
local record = table.concat(parts)
redis.call('HSET', KEYS[2], ARGV[1], record)
return {'seated', record}
"""

# KEYS: run, releases, seatings. ARGV: link, record, oldest seating that is kept.
RELEASE = """
local before = redis.call('HGET', KEYS[2], ARGV[1])
if before then return {'out', before} end
local highest = redis.call('HGET', KEYS[1], 'highest')
if not highest then return {'unknown'} end
if tonumber(ARGV[1]) <= tonumber(highest) then return {'late', highest} end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[1], 'highest', ARGV[1])
for _, link in ipairs(redis.call('HKEYS', KEYS[3])) do
    if tonumber(link) < tonumber(ARGV[3]) then redis.call('HDEL', KEYS[3], link) end
end
return {'out', ARGV[2]}
"""

# KEYS: run, number of runs. ARGV: rounds, salt, anchor, signature.
START = """
if redis.call('EXISTS', KEYS[1]) == 0 then
    redis.call('HSET', KEYS[1], 'rounds', ARGV[1], 'salt', ARGV[2], 'anchor', ARGV[3],
               'signature', ARGV[4], 'highest', '0')
    redis.call('INCR', KEYS[2])
end
return 1
"""
