-- wrk script: chat completions of 200 conversations, one after another, as a prefix-aware router meets them.
--
--   wrk ... -s conversations.lua URL -- BODY_BYTES [stream] [close]
--
-- Each body opens with one of 6 system prompts (a fifth of it, at most 4 KB), goes on with the conversation's own
-- history and ends with a message never sent before (3 tenths of it, at most 2 KB): a router finds a prefix that it
-- knows at every request after the first round, and has something new to remember at every one.
-- At its end it prints "percentiles_us P50 P90 P99 requests N errors N".

local CONVERSATIONS, SYSTEM_PROMPTS = 200, 6
local WORDS = {
  "path", "join", "the", "of", "file", "server", "answer", "when", "cache", "is", "block", "and", "token", "request",
  "a", "model", "engine", "to", "prefix", "with", "session", "which", "retry", "for", "stream", "queue", "in", "héad",
}

local state = 1
local function draw(n)
  state = (state * 16807) % 2147483647
  return state % n + 1
end

-- About `bytes` of words that only this seed gives. A kilobyte is drawn, then repeated under growing numbers.
local function text(seed, bytes)
  state = seed * 7919 + 17
  local words, size = {}, 0
  while size < math.min(bytes, 1000) do
    words[#words + 1] = WORDS[draw(#WORDS)]
    size = size + #words[#words] + 1
  end
  local paragraph = table.concat(words, " ")
  local parts = {}
  size = 0
  while size < bytes do
    parts[#parts + 1] = #parts .. " " .. paragraph .. "\\n"
    size = size + #parts[#parts]
  end
  return (table.concat(parts):sub(1, bytes):gsub("[\128-\255\\]+$", ""))
end

local openings, ending = {}, nil
local fresh = {}
local sent = 0
local headers = { ["Content-Type"] = "application/json" }

function init(args)
  local bytes, stream = tonumber(args[1]), false
  for i = 2, #args do
    if args[i] == "stream" then stream = true end
    if args[i] == "close" then headers["Connection"] = "close" end
  end
  ending = '"}],"max_tokens":100,"temperature":0' .. (stream and ',"stream":true}' or "}")
  local new = math.min(math.floor(bytes * 0.3), 2048)
  local system = math.min(math.floor(bytes * 0.2), 4096)
  local systems = {}
  for i = 1, SYSTEM_PROMPTS do systems[i] = text(i, system) end
  for i = 1, CONVERSATIONS do
    local opening = '{"model":"mock","messages":[{"role":"system","content":"' .. systems[i % SYSTEM_PROMPTS + 1]
      .. '"},{"role":"user","content":"'
    local middle = '"},{"role":"assistant","content":"It depends."},{"role":"user","content":"'
    local history = math.max(bytes - new - #opening - #middle - #ending, 16)
    openings[i] = opening .. text(1000 + i, history) .. middle
  end
  for i = 1, 64 do fresh[i] = text(5000 + i, new - 12) end
end

function request()
  sent = sent + 1
  -- the number leads, so that no block of the new message was ever sent before
  local body = openings[sent % CONVERSATIONS + 1] .. string.format("%010d ", sent) .. fresh[sent % 64 + 1] .. ending
  return wrk.format("POST", "/v1/chat/completions", headers, body)
end

function done(summary, latency, _)
  local e = summary.errors
  io.write(string.format("percentiles_us %d %d %d requests %d errors %d\n", latency:percentile(50),
    latency:percentile(90), latency:percentile(99), summary.requests,
    e.connect + e.read + e.write + e.status + e.timeout))
end
