/* An Ethernet switch in one process, for tests (tests/chaos/net.py): it joins network namespaces by
 * a TAP device in each, and drops, delays, repeats, reorders or resets what goes through by rules.
 * This gives partitions and bad networks on kernels without netem and iptables. Needs root.
 *
 * usage: net_switch SEED DEVICE NAME=PID...     PID: a process of the namespace; 0: this one's
 * Commands on stdin, one a line, each answered by "ok" or "bad ...":
 *   set SRC DST KEY=VALUE...   rule for frames from SRC to DST (names, or * for all); keys below
 *   clear                      no rules
 *   stats                      forwarded, dropped, repeated, held back, reset; bytes queued now */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define PORTS_MAX   8
#define RULES_MAX   64
#define FRAME_MAX   16384
#define QUEUED_MAX  (32u << 20)  /* bytes held back for all pairs: a real switch has less */
#define BACKLOG_NS  400000000ull /* a rate-limited pair drops what would wait longer */
#define ETHER_BYTES 14

struct rule {
    int src, dst;      /* -1: all */
    uint16_t tcp_port; /* 0: all frames */
    double loss, dup, reorder, rst;
    uint64_t delay_ns, rate_bps, free_ns;
    uint32_t mtu; /* longer frames vanish without a word */
};

struct held { /* a frame that waits until due_ns */
    uint64_t due_ns, order;
    int port;
    uint32_t len;
    uint8_t bytes[];
};

struct port {
    char name[16];
    uint8_t mac[6];
    bool has_mac;
};

static struct port ports[PORTS_MAX];
static struct pollfd fds[PORTS_MAX + 1]; /* the last is stdin */
static int n_ports, n_rules;
static struct rule rules[RULES_MAX];
static struct held **heap;
static size_t n_held, held_cap, held_bytes;
static uint64_t order, rng;
static struct {
    unsigned long forwarded, dropped, repeated, held, reset;
} stats;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static bool chance(double p)
{
    if (p <= 0) {
        return false;
    }
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (double)(rng >> 11) / 9007199254740992.0 < p;
}

/* ---- frames that wait, the earliest first ---- */

static bool before(const struct held *a, const struct held *b)
{
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->order < b->order;
}

static void hold(uint64_t due_ns, int port, const uint8_t *bytes, uint32_t len)
{
    if (held_bytes + len > QUEUED_MAX) {
        stats.dropped++;
        return;
    }
    if (n_held == held_cap) {
        held_cap = held_cap == 0 ? 1024 : held_cap * 2;
        heap = realloc(heap, held_cap * sizeof(*heap));
    }
    struct held *h = malloc(sizeof(*h) + len);
    if (heap == NULL || h == NULL) {
        fprintf(stderr, "net_switch: out of memory\n");
        exit(1);
    }
    *h = (struct held){.due_ns = due_ns, .order = order++, .port = port, .len = len};
    memcpy(h->bytes, bytes, len);
    size_t i = n_held++;
    for (; i > 0 && before(h, heap[(i - 1) / 2]); i = (i - 1) / 2) {
        heap[i] = heap[(i - 1) / 2];
    }
    heap[i] = h;
    held_bytes += len;
    stats.held++;
}

static struct held *take_first(void)
{
    struct held *first = heap[0], *last = heap[--n_held];
    size_t i = 0;
    for (size_t c; (c = 2 * i + 1) < n_held; i = c) {
        if (c + 1 < n_held && before(heap[c + 1], heap[c])) {
            c++;
        }
        if (!before(heap[c], last)) {
            break;
        }
        heap[i] = heap[c];
    }
    heap[i] = last;
    held_bytes -= first->len;
    return first;
}

static void put(int port, const uint8_t *bytes, uint32_t len)
{
    if (write(fds[port].fd, bytes, len) == (ssize_t)len) {
        stats.forwarded++;
    } else {
        stats.dropped++; /* the device's queue is full, or the device is down */
    }
}

/* ---- IPv4 and TCP, as far as rules look at them ---- */

/* Offset of the TCP header, 0 if the frame has none. */
static uint32_t tcp_at(const uint8_t *f, uint32_t len)
{
    if (len < ETHER_BYTES + 20 || f[12] != 8 || f[13] != 0 || f[23] != IPPROTO_TCP) {
        return 0;
    }
    uint32_t at = ETHER_BYTES + (uint32_t)(f[14] & 15) * 4;
    return at >= ETHER_BYTES + 20 && len >= at + 20 ? at : 0;
}

static uint32_t sum16(const uint8_t *p, uint32_t len, uint32_t sum)
{
    for (uint32_t i = 0; i + 1 < len; i += 2) {
        sum += (uint32_t)p[i] << 8 | p[i + 1];
    }
    return len % 2 != 0 ? sum + ((uint32_t)p[len - 1] << 8) : sum;
}

static void store_sum(uint8_t *p, uint32_t sum)
{
    while (sum >> 16 != 0) {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    p[0] = (uint8_t)(~sum >> 8);
    p[1] = (uint8_t)~sum;
}

/* Makes an RST of a TCP frame that carries data; its new length, 0 if it carries none. */
static uint32_t make_rst(uint8_t *f, uint32_t at, uint32_t len)
{
    uint32_t ip_len = (uint32_t)f[16] << 8 | f[17], head = at + (uint32_t)(f[at + 12] >> 4) * 4;
    if (head >= ETHER_BYTES + ip_len || len < at + 20) {
        return 0;
    }
    uint32_t total = at - ETHER_BYTES + 20;
    f[16] = (uint8_t)(total >> 8);
    f[17] = (uint8_t)total;
    f[24] = f[25] = 0;
    store_sum(f + 24, sum16(f + ETHER_BYTES, at - ETHER_BYTES, 0));
    f[at + 12] = 5 << 4;
    f[at + 13] = 0x14; /* RST, ACK */
    memset(f + at + 14, 0, 6);
    store_sum(f + at + 16, sum16(f + at, 20, sum16(f + 26, 8, IPPROTO_TCP + 20)));
    return at + 20;
}

/* ---- forwarding ---- */

static struct rule *rule_for(int src, int dst, const uint8_t *f, uint32_t tcp)
{
    for (int i = 0; i < n_rules; i++) {
        struct rule *r = &rules[i];
        if ((r->src >= 0 && r->src != src) || (r->dst >= 0 && r->dst != dst)) {
            continue;
        }
        if (r->tcp_port == 0) {
            return r;
        }
        if (tcp != 0 && ((f[tcp] << 8 | f[tcp + 1]) == r->tcp_port ||
                         (f[tcp + 2] << 8 | f[tcp + 3]) == r->tcp_port)) {
            return r;
        }
    }
    return NULL;
}

static void forward(int src, int dst, const uint8_t *frame, uint32_t len)
{
    uint32_t tcp = tcp_at(frame, len);
    struct rule *r = rule_for(src, dst, frame, tcp);
    if (r == NULL) {
        put(dst, frame, len);
        return;
    }
    if (chance(r->loss) || (r->mtu != 0 && len > r->mtu)) {
        stats.dropped++;
        return;
    }
    uint8_t f[FRAME_MAX];
    memcpy(f, frame, len);
    if (tcp != 0 && chance(r->rst)) {
        uint32_t reset = make_rst(f, tcp, len);
        stats.reset += reset != 0;
        len = reset != 0 ? reset : len;
    }
    uint64_t now = now_ns(), due = now;
    if (r->rate_bps != 0) {
        uint64_t start = r->free_ns > now ? r->free_ns : now;
        if (start - now > BACKLOG_NS) {
            stats.dropped++;
            return;
        }
        due = r->free_ns = start + len * 8000000000ull / r->rate_bps;
    }
    due += r->delay_ns;
    if (chance(r->reorder)) {
        due += 5000000;
    }
    int copies = 1 + chance(r->dup);
    stats.repeated += (unsigned long)(copies - 1);
    for (int i = 0; i < copies; i++) {
        if (due == now) {
            put(dst, f, len);
        } else {
            hold(due, dst, f, len);
        }
    }
}

static void take_frame(int src)
{
    static uint8_t f[FRAME_MAX];
    for (int n = 0; n < 64; n++) {
        ssize_t got = read(fds[src].fd, f, sizeof(f));
        if (got < ETHER_BYTES) {
            return;
        }
        memcpy(ports[src].mac, f + 6, 6);
        ports[src].has_mac = true;
        int dst = -1;
        for (int i = 0; i < n_ports && (f[0] & 1) == 0; i++) {
            if (ports[i].has_mac && memcmp(ports[i].mac, f, 6) == 0) {
                dst = i;
            }
        }
        for (int i = 0; i < n_ports; i++) {
            if (i != src && (dst < 0 || i == dst)) {
                forward(src, i, f, (uint32_t)got);
            }
        }
    }
}

/* ---- commands ---- */

static int port_named(const char *name) /* -1: all; -2: there is none */
{
    for (int i = 0; i < n_ports; i++) {
        if (strcmp(ports[i].name, name) == 0) {
            return i;
        }
    }
    return strcmp(name, "*") == 0 ? -1 : -2;
}

static bool read_rule(char *words)
{
    char *save = NULL, *src = strtok_r(words, " \n", &save), *dst = strtok_r(NULL, " \n", &save);
    struct rule r = {0};
    if (src == NULL || dst == NULL || n_rules == RULES_MAX) {
        return false;
    }
    r.src = port_named(src);
    r.dst = port_named(dst);
    if (r.src == -2 || r.dst == -2) {
        return false;
    }
    for (char *w; (w = strtok_r(NULL, " \n", &save)) != NULL;) {
        char key[16];
        double v;
        if (sscanf(w, "%15[a-z]=%lf", key, &v) != 2 || !(v >= 0)) {
            return false;
        }
        if (strcmp(key, "loss") == 0) { /* 0 to 1; 1: cut off */
            r.loss = v;
        } else if (strcmp(key, "dup") == 0) {
            r.dup = v;
        } else if (strcmp(key, "reorder") == 0) {
            r.reorder = v;
        } else if (strcmp(key, "rst") ==
                   0) { /* of frames with TCP data: this share becomes an RST */
            r.rst = v;
        } else if (strcmp(key, "delay") == 0) { /* ms */
            r.delay_ns = (uint64_t)(v * 1e6);
        } else if (strcmp(key, "rate") == 0) { /* kbit/s */
            r.rate_bps = (uint64_t)(v * 1e3);
        } else if (strcmp(key, "mtu") == 0) {
            r.mtu = (uint32_t)v;
        } else if (strcmp(key, "port") == 0) { /* only TCP frames from or to it */
            r.tcp_port = (uint16_t)v;
        } else {
            return false;
        }
    }
    rules[n_rules++] = r;
    return true;
}

static void command(char *line)
{
    bool ok = true;
    if (strncmp(line, "set ", 4) == 0) {
        ok = read_rule(line + 4);
    } else if (strncmp(line, "clear", 5) == 0) {
        n_rules = 0;
    } else if (strncmp(line, "stats", 5) == 0) {
        printf("stats forwarded=%lu dropped=%lu repeated=%lu held=%lu reset=%lu queued=%zu\n",
               stats.forwarded, stats.dropped, stats.repeated, stats.held, stats.reset, held_bytes);
    } else {
        ok = false;
    }
    printf("%s\n", ok ? "ok" : "bad command");
    fflush(stdout);
}

/* False: stdin has ended. */
static bool take_commands(void)
{
    static char buf[4096];
    static size_t len;
    ssize_t got = read(STDIN_FILENO, buf + len, sizeof(buf) - 1 - len);
    if (got <= 0) {
        return false;
    }
    len += (size_t)got;
    buf[len] = '\0';
    for (char *end; (end = strchr(buf, '\n')) != NULL;) {
        *end = '\0';
        command(buf);
        len -= (size_t)(end + 1 - buf);
        memmove(buf, end + 1, len + 1);
    }
    return len < sizeof(buf) - 1;
}

/* ---- start ---- */

static int open_tap(const char *device)
{
    struct ifreq r = {0};
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    r.ifr_flags = IFF_TAP | IFF_NO_PI;
    snprintf(r.ifr_name, IFNAMSIZ, "%.15s", device);
    return ioctl(fd, TUNSETIFF, &r) == 0 ? fd : -1;
}

static bool add_port(const char *device, const char *arg, int home)
{
    struct port *p = &ports[n_ports];
    int pid, tap = -1;
    if (n_ports == PORTS_MAX || sscanf(arg, "%15[^=]=%d", p->name, &pid) != 2) {
        errno = EINVAL;
        return false;
    }
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/ns/net", pid);
    int ns = pid == 0 ? dup(home) : open(path, O_RDONLY | O_CLOEXEC);
    if (ns >= 0 && setns(ns, CLONE_NEWNET) == 0) {
        tap = open_tap(device);
    }
    if (ns >= 0) {
        close(ns);
    }
    fds[n_ports++] = (struct pollfd){.fd = tap, .events = POLLIN};
    return setns(home, CLONE_NEWNET) == 0 && tap >= 0;
}

static int wait_ms(void)
{
    if (n_held == 0) {
        return -1;
    }
    uint64_t now = now_ns();
    return heap[0]->due_ns <= now ? 0 : (int)((heap[0]->due_ns - now) / 1000000 + 1);
}

int main(int argc, char **argv)
{
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (argc < 4 || home < 0) {
        fprintf(stderr, "usage: net_switch SEED DEVICE NAME=PID...\n");
        return 2;
    }
    rng = strtoull(argv[1], NULL, 10) * 2 + 1;
    for (int i = 3; i < argc; i++) {
        if (!add_port(argv[2], argv[i], home)) {
            fprintf(stderr, "net_switch: no device for %s: %s\n", argv[i], strerror(errno));
            return 1;
        }
    }
    fds[n_ports] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        if (poll(fds, (nfds_t)n_ports + 1, wait_ms()) < 0 && errno != EINTR) {
            return 1;
        }
        while (n_held > 0 && heap[0]->due_ns <= now_ns()) {
            struct held *h = take_first();
            put(h->port, h->bytes, h->len);
            free(h);
        }
        for (int i = 0; i < n_ports; i++) {
            if ((fds[i].revents & POLLIN) != 0) {
                take_frame(i);
            }
        }
        if ((fds[n_ports].revents & (POLLIN | POLLHUP)) != 0 && !take_commands()) {
            return 0; /* whoever started it has gone */
        }
    }
}
