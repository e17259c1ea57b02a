/* A vLLM-shaped HTTP server that costs next to nothing, for measuring what a proxy in front of it costs.
 *
 * One thread, epoll, keep-alive, no allocation per chunk. It listens on --engines loopback ports, one engine each,
 * and prints "ports A B C ..." once all of them accept. Sizes follow recordings of vLLM 0.32: an answer of about
 * 770 bytes, events of about 220, a stream's head sent at acceptance and its first event later, /metrics of 50 KB.
 *
 *   GET /health, /v1/models, /metrics         as an engine has them
 *   POST /v1/chat/completions, /v1/completions one JSON answer, or with "stream": true --chunks events, one every
 *                                             --interval-ms, each in a write of its own; the last one brings [DONE]
 *   GET /mock/counters                        what was served so far: {"requests", "chunks", "open_streams", ...}
 *
 * --silent: a stream sends one event and then nothing until the client leaves.
 * The first event comes after a pseudo-random part of the interval, so that streams that were opened together do not
 * tick together: a proxy then meets one chunk a read, as it does before real engines.
 *
 *   cc -O2 -Wall -Wextra -o mock_engine mock_engine.c && ./mock_engine --engines 4
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ENGINES = 512, MAX_EVENTS = 256, HEAD_LIMIT = 65536, EVENT_SIZE = 512 };
static const size_t BODY_LIMIT = 64u << 20;
static const size_t PENDING_LIMIT = 1u << 20; /* a client that does not read is cut off here */

struct conn {
    int fd;
    int listening;
    int closing; /* the request asked for Connection: close */
    uint32_t epoll_mask;
    char *in;
    size_t in_len, in_cap, scanned;
    char *out; /* what the socket did not take yet */
    size_t out_len, out_cap;
    int chunks_left;    /* > 0 while a stream is open */
    int waits_silently; /* the stream sent its one event */
    uint64_t due_ns;
    int heap_at; /* position in the timer heap, -1 outside */
};

static int epoll_fd, timer_fd;
static int engines = 1, chunks_per_stream = 100, silent;
static uint64_t interval_ns = 10000000;
static uint64_t served_requests, served_chunks, accepted, aborted_streams;
static long open_streams;

static char *metrics_body;
static size_t metrics_len;
static char first_event[EVENT_SIZE], event[EVENT_SIZE], last_event[EVENT_SIZE];
static size_t first_event_len, event_len, last_event_len;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint32_t random_u32(void) {
    static uint64_t state = 0x9e3779b97f4a7c15u; /* the same phases in every run */
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

/* ---- timers: a binary heap of the streams by their next event ---- */

static struct conn **heap;
static int heap_len, heap_cap;

static void heap_put(int at, struct conn *c) {
    heap[at] = c;
    c->heap_at = at;
}

static void heap_sift(int at) {
    struct conn *c = heap[at];
    while (at > 0 && heap[(at - 1) / 2]->due_ns > c->due_ns) {
        heap_put(at, heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        int child = 2 * at + 1;
        if (child >= heap_len) break;
        if (child + 1 < heap_len && heap[child + 1]->due_ns < heap[child]->due_ns) child++;
        if (heap[child]->due_ns >= c->due_ns) break;
        heap_put(at, heap[child]);
        at = child;
    }
    heap_put(at, c);
}

static void heap_add(struct conn *c) {
    if (heap_len == heap_cap) {
        heap_cap = heap_cap ? 2 * heap_cap : 1024;
        heap = realloc(heap, (size_t)heap_cap * sizeof *heap);
        if (!heap) die("realloc");
    }
    heap_put(heap_len++, c);
    heap_sift(c->heap_at);
}

static void heap_remove(struct conn *c) {
    int at = c->heap_at;
    if (at < 0) return;
    c->heap_at = -1;
    struct conn *last = heap[--heap_len];
    if (last != c) {
        heap_put(at, last);
        heap_sift(at);
    }
}

/* ---- connections ---- */

static void conn_close(struct conn *c) {
    if (c->chunks_left > 0) {
        open_streams--;
        aborted_streams++;
    }
    heap_remove(c);
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

static void watch(struct conn *c, uint32_t mask) {
    if (mask == c->epoll_mask) return;
    struct epoll_event e = {.events = mask, .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e) < 0) die("epoll_ctl");
    c->epoll_mask = mask;
}

/* Write, and keep what the socket does not take. 0, or -1 when the connection is beyond use. */
static int conn_send(struct conn *c, const char *data, size_t len) {
    if (c->out_len == 0) {
        ssize_t n = send(c->fd, data, len, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno != EAGAIN) return -1;
            n = 0;
        }
        data += n;
        len -= (size_t)n;
    }
    if (len == 0) return 0;
    if (c->out_len + len > PENDING_LIMIT) return -1;
    if (c->out_len + len > c->out_cap) {
        c->out_cap = 2 * (c->out_len + len);
        c->out = realloc(c->out, c->out_cap);
        if (!c->out) die("realloc");
    }
    memcpy(c->out + c->out_len, data, len);
    c->out_len += len;
    watch(c, EPOLLIN | EPOLLRDHUP | EPOLLOUT);
    return 0;
}

static int conn_flush(struct conn *c) {
    ssize_t n = send(c->fd, c->out, c->out_len, MSG_NOSIGNAL);
    if (n < 0) return errno == EAGAIN ? 0 : -1;
    c->out_len -= (size_t)n;
    memmove(c->out, c->out + n, c->out_len);
    if (c->out_len == 0) watch(c, EPOLLIN | EPOLLRDHUP);
    return 0;
}

/* ---- answers ---- */

static int answer(struct conn *c, const char *status, const char *type, const char *body, size_t len) {
    char head[256];
    int n = snprintf(head, sizeof head,
                     "HTTP/1.1 %s\r\ndate: Mon, 30 Nov 2026 18:03:24 GMT\r\nserver: uvicorn\r\ncontent-length: %zu\r\n"
                     "content-type: %s\r\nvary: Origin\r\n\r\n",
                     status, len, type);
    char small[4096];
    if ((size_t)n + len <= sizeof small) { /* one segment, as uvicorn sends it */
        memcpy(small, head, (size_t)n);
        memcpy(small + n, body, len);
        return conn_send(c, small, (size_t)n + len);
    }
    if (conn_send(c, head, (size_t)n) < 0) return -1;
    return conn_send(c, body, len);
}

static int answer_completion(struct conn *c, size_t body_len) {
    char body[1024];
    unsigned prompt_tokens = (unsigned)(body_len / 4 + 1);
    int n = snprintf(
        body, sizeof body,
        "{\"id\":\"chatcmpl-%08x%08x\",\"object\":\"chat.completion\",\"created\":1796061805,\"model\":\"mock\","
        "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"It joins the parts of a path.\","
        "\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,\"reasoning\":null},"
        "\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":null,"
        "\"routed_experts\":null}],\"service_tier\":null,\"system_fingerprint\":\"vllm-0.32.0-dc212403\","
        "\"usage\":{\"prompt_tokens\":%u,\"total_tokens\":%u,\"completion_tokens\":6,\"prompt_tokens_details\":"
        "{\"cached_tokens\":%u,\"created_cache_tokens\":64,\"multimodal_tokens\":null},"
        "\"completion_tokens_details\":null},\"prompt_logprobs\":null,\"prompt_token_ids\":null,"
        "\"prompt_text\":null,\"kv_transfer_params\":null,\"ec_transfer_params\":null,\"metrics\":null}",
        random_u32(), random_u32(), prompt_tokens, prompt_tokens + 6, prompt_tokens / 2);
    served_requests++;
    return answer(c, "200 OK", "application/json", body, (size_t)n);
}

static int begin_stream(struct conn *c) {
    static const char head[] =
        "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 18:03:24 GMT\r\nserver: uvicorn\r\n"
        "content-type: text/event-stream; charset=utf-8\r\nvary: Origin\r\ntransfer-encoding: chunked\r\n\r\n";
    c->chunks_left = chunks_per_stream;
    c->waits_silently = 0;
    c->due_ns = now_ns() + (uint64_t)random_u32() * interval_ns / UINT32_MAX;
    open_streams++;
    heap_add(c);
    return conn_send(c, head, sizeof head - 1);
}

static int answer_request(struct conn *c, const char *head, size_t head_len, const char *body, size_t body_len) {
#define STARTS(text) (head_len >= sizeof(text) - 1 && memcmp(head, text, sizeof(text) - 1) == 0)
    if (STARTS("POST /v1/chat/completions") || STARTS("POST /v1/completions")) {
        int stream = memmem(body, body_len, "\"stream\": true", 14) || memmem(body, body_len, "\"stream\":true", 13);
        return stream ? begin_stream(c) : answer_completion(c, body_len);
    }
    if (STARTS("GET /health ")) return answer(c, "200 OK", "text/plain", "", 0);
    if (STARTS("GET /metrics ")) return answer(c, "200 OK", "text/plain; version=0.0.4", metrics_body, metrics_len);
    if (STARTS("GET /v1/models ")) {
        static const char models[] =
            "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1796061805,"
            "\"owned_by\":\"vllm\",\"root\":\"mock\",\"parent\":null,\"max_model_len\":131072,\"permission\":[]}]}";
        return answer(c, "200 OK", "application/json", models, sizeof models - 1);
    }
    if (STARTS("GET /mock/counters ")) {
        char text[256];
        int n = snprintf(text, sizeof text,
                         "{\"requests\": %llu, \"chunks\": %llu, \"open_streams\": %ld, \"aborted_streams\": %llu, "
                         "\"connections\": %llu}",
                         (unsigned long long)served_requests, (unsigned long long)served_chunks, open_streams,
                         (unsigned long long)aborted_streams, (unsigned long long)accepted);
        return answer(c, "200 OK", "application/json", text, (size_t)n);
    }
#undef STARTS
    static const char missing[] = "{\"detail\":\"Not Found\"}";
    return answer(c, "404 Not Found", "application/json", missing, sizeof missing - 1);
}

/* The value of a header in a head, without its line end; NULL if absent. */
static const char *header_value(const char *head, size_t head_len, const char *name) {
    size_t name_len = strlen(name);
    const char *end = head + head_len, *line = memchr(head, '\n', head_len);
    while (line && ++line < end) {
        if ((size_t)(end - line) > name_len && strncasecmp(line, name, name_len) == 0 && line[name_len] == ':') {
            const char *value = line + name_len + 1;
            while (value < end && *value == ' ') value++;
            return value;
        }
        line = memchr(line, '\n', (size_t)(end - line));
    }
    return NULL;
}

/* Answer every whole request in the buffer. 0, or -1 to close. */
static int serve_buffer(struct conn *c) {
    while (c->chunks_left == 0 && c->in_len > 0) {
        size_t from = c->scanned > 3 ? c->scanned - 3 : 0;
        char *stop = memmem(c->in + from, c->in_len - from, "\r\n\r\n", 4);
        if (!stop) {
            c->scanned = c->in_len;
            return c->in_len > HEAD_LIMIT ? -1 : 0;
        }
        size_t head_len = (size_t)(stop - c->in) + 4;
        c->scanned = head_len - 1; /* while the body is incomplete, the next search starts at the head's end */
        if (header_value(c->in, head_len, "transfer-encoding")) {
            static const char text[] = "{\"detail\":\"the mock reads bodies with Content-Length only\"}";
            answer(c, "411 Length Required", "application/json", text, sizeof text - 1);
            return -1;
        }
        const char *length = header_value(c->in, head_len, "content-length");
        size_t body_len = length ? strtoull(length, NULL, 10) : 0;
        if (body_len > BODY_LIMIT) return -1;
        if (c->in_len < head_len + body_len) return 0;
        const char *connection = header_value(c->in, head_len, "connection");
        c->closing = connection && strncasecmp(connection, "close", 5) == 0;
        if (answer_request(c, c->in, head_len, c->in + head_len, body_len) < 0) return -1;
        c->in_len -= head_len + body_len;
        memmove(c->in, c->in + head_len + body_len, c->in_len);
        c->scanned = 0;
        if (c->closing && c->chunks_left == 0) return -1;
    }
    return 0;
}

static int conn_read(struct conn *c) {
    for (;;) {
        if (c->in_len == c->in_cap) {
            if (c->in_cap > BODY_LIMIT) return -1;
            c->in_cap = c->in_cap ? 2 * c->in_cap : 4096;
            c->in = realloc(c->in, c->in_cap);
            if (!c->in) die("realloc");
        }
        size_t room = c->in_cap - c->in_len;
        ssize_t n = recv(c->fd, c->in + c->in_len, room, 0);
        if (n == 0) return -1;
        if (n < 0) return errno == EAGAIN ? 0 : -1;
        c->in_len += (size_t)n;
        if (serve_buffer(c) < 0) return -1;
        if ((size_t)n < room) return 0;
    }
}

static void accept_all(struct conn *listener) {
    for (;;) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EAGAIN || errno == ECONNABORTED) return;
            die("accept4");
        }
        int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct conn *c = calloc(1, sizeof *c);
        if (!c) die("calloc");
        c->fd = fd;
        c->heap_at = -1;
        c->epoll_mask = EPOLLIN | EPOLLRDHUP;
        struct epoll_event e = {.events = c->epoll_mask, .data.ptr = c};
        if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e) < 0) die("epoll_ctl");
        accepted++;
    }
}

/* Send the event of one stream whose time has come. 0, or -1 to close. */
static int tick(struct conn *c) {
    int is_first = c->chunks_left == chunks_per_stream, is_last = c->chunks_left == 1 && !silent;
    const char *data = is_last ? last_event : is_first ? first_event : event;
    size_t len = is_last ? last_event_len : is_first ? first_event_len : event_len;
    served_chunks++;
    if (silent) {
        c->waits_silently = 1;
        heap_remove(c);
        return conn_send(c, data, len);
    }
    c->chunks_left--;
    if (is_last) {
        heap_remove(c);
        open_streams--;
        served_requests++;
    } else {
        c->due_ns += interval_ns;
        heap_sift(c->heap_at);
    }
    if (conn_send(c, data, len) < 0) return -1;
    if (!is_last) return 0;
    return c->closing ? -1 : serve_buffer(c);
}

/* ---- start ---- */

static size_t render_event(char *out, const char *delta, const char *rest, const char *after) {
    char data[EVENT_SIZE];
    int n = snprintf(data, sizeof data,
                     "data: {\"id\":\"chatcmpl-966c412ee34be2dd\",\"object\":\"chat.completion.chunk\","
                     "\"created\":1796061805,\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{%s},"
                     "\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
                     delta, rest);
    return (size_t)snprintf(out, EVENT_SIZE, "%x\r\n%s\r\n%s", n, data, after);
}

static void render_metrics(void) {
    FILE *f = open_memstream(&metrics_body, &metrics_len);
    if (!f) die("open_memstream");
    fputs("vllm:num_requests_running{engine=\"0\",model_name=\"mock\"} 2.0\n"
          "vllm:num_requests_waiting{engine=\"0\",model_name=\"mock\"} 0.0\n"
          "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"mock\"} 0.25\n"
          "vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"mock\"} 1.0e+06\n"
          "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"mock\"} 5.0e+05\n"
          "vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"True\",engine=\"0\","
          "kv_cache_size_tokens=\"1048576\",num_gpu_blocks=\"65536\"} 1.0\n",
          f);
    /* the histograms that make a real engine's /metrics 50 KB, so that polling it costs what it costs there */
    for (int series = 0; series < 30; series++)
        for (int bucket = 0; bucket < 20; bucket++)
            fprintf(f, "vllm:mock_histogram_%d_seconds_bucket{engine=\"0\",le=\"%d.0\",model_name=\"mock\"} %d.0\n",
                    series, 1 << bucket, bucket * 100);
    if (fclose(f) != 0) die("metrics");
}

static int listen_on_free_port(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    struct conn *c = calloc(1, sizeof *c);
    if (!c) die("calloc");
    c->listening = 1;
    c->heap_at = -1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || bind(c->fd, (struct sockaddr *)&address, size) < 0 || listen(c->fd, 4096) < 0) die("listen");
    if (getsockname(c->fd, (struct sockaddr *)&address, &size) < 0) die("getsockname");
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e) < 0) die("epoll_ctl");
    return ntohs(address.sin_port);
}

static long number(const char *name, const char *text, long low, long high) {
    char *end;
    long value = strtol(text ? text : "", &end, 10);
    if (!text || !*text || *end || value < low || value > high) {
        fprintf(stderr, "%s wants a whole number from %ld to %ld\n", name, low, high);
        exit(2);
    }
    return value;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--silent")) silent = 1;
        else if (!strcmp(argv[i], "--engines")) engines = (int)number("--engines", argv[++i], 1, MAX_ENGINES);
        else if (!strcmp(argv[i], "--chunks")) chunks_per_stream = (int)number("--chunks", argv[++i], 1, 1000000);
        else if (!strcmp(argv[i], "--interval-ms"))
            interval_ns = (uint64_t)number("--interval-ms", argv[++i], 1, 60000) * 1000000u;
        else {
            fprintf(stderr, "unknown argument %s\n", argv[i]);
            return 2;
        }
    }
    signal(SIGPIPE, SIG_IGN);
    first_event_len = render_event(first_event, "\"role\":\"assistant\",\"content\":\"\"", "null", "");
    event_len = render_event(event, "\"content\":\" joins\"", "null,\"token_ids\":null", "");
    last_event_len = render_event(last_event, "\"content\":\".\"", "\"length\",\"stop_reason\":null",
                                  "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    render_metrics();

    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (epoll_fd < 0 || timer_fd < 0) die("epoll");
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &e) < 0) die("epoll_ctl");
    printf("ports");
    for (int i = 0; i < engines; i++) printf(" %d", listen_on_free_port());
    printf("\n");
    fflush(stdout);

    for (;;) {
        struct epoll_event events[MAX_EVENTS];
        int n = epoll_wait(epoll_fd, events, MAX_EVENTS, -1);
        if (n < 0 && errno != EINTR) die("epoll_wait");
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            if (!c) {
                uint64_t expirations;
                if (read(timer_fd, &expirations, sizeof expirations) < 0 && errno != EAGAIN) die("timerfd");
            } else if (c->listening) {
                accept_all(c);
            } else if (((events[i].events & EPOLLOUT) && conn_flush(c) < 0) ||
                       ((events[i].events & EPOLLIN) && conn_read(c) < 0) ||
                       (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))) {
                conn_close(c); /* vLLM too takes a half-close for a client that left */
            }
        }
        uint64_t now = now_ns();
        while (heap_len && heap[0]->due_ns <= now) {
            struct conn *c = heap[0];
            if (tick(c) < 0) conn_close(c);
        }
        if (heap_len) {
            uint64_t due = heap[0]->due_ns;
            struct itimerspec when = {.it_value = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)}};
            if (timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &when, NULL) < 0) die("timerfd_settime");
        }
    }
}
