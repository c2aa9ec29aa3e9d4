/* Writes to its memory in every way that Linux has, and checks each byte before it writes it again.
 *
 *     writer --file PATH   makes the file that is read
 *     writer WAY...        in a folder with: slow/file (FUSE, direct_io), disk (a file), requests
 *
 * Each way is a lane: a thread with an area of its own, cut into cells. A cell has a key, from which
 * each of its bytes follows. The keys are in shared memory, which is never read before the freeze.
 * A lane goes over its cells: is the cell what its key says? then a new key, and the cell is written
 * to in the lane's way. "status-PIDNS" has the rounds of the slowest lane, and how many cells were
 * checked and wrong; "errors" says what was not as it was written.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CELL = 64 << 10, CELLS = 48, LANES = 32, AREA = CELL * CELLS };
#define FILE_SIZE (16L << 20)
#define ZERO UINT64_MAX
#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

struct request { /* in the file "requests": another process is to write to a cell */
    volatile uint64_t number, done;
    uint64_t address, key, pid;
};
struct ledger { /* shared memory */
    volatile uint64_t keys[LANES][CELLS], rounds[LANES], checked, wrong;
    volatile uint64_t next;
} *ledger;
static struct request *requests;

struct lane {
    int number, fd, feed;
    char *area;
    const struct way *way;
    volatile uint64_t wanted; /* the key that the feeding thread is to send; 0: none */
    pthread_t thread, feeder;
};
struct way {
    const char *name;
    void (*write)(struct lane *, int cell);
    void (*start)(struct lane *);
};
static __thread unsigned dice = 1;

static uint64_t word(uint64_t key, long i) {
    return key == ZERO ? 0 : (key + i) * 0x9E3779B97F4A7C15ull;
}
static void fill(char *at, uint64_t key) {
    for (long i = 0; i < CELL / 8; i++) ((volatile uint64_t *)at)[i] = word(key, i);
}
static char *cell_at(struct lane *l, int cell) { return l->area + (long)cell * CELL; }
static uint64_t new_key(void) { return __sync_add_and_fetch(&ledger->next, CELL / 8) + (1ull << 40); }
static void rest(long us) {
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, 0);
}
static void complain(const char *text) {
    int fd = open("errors", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (write(fd, text, strlen(text)) < 0) abort();
    close(fd);
}
static void check(struct lane *l, int cell) {
    uint64_t key = ledger->keys[l->number][cell], *at = (uint64_t *)cell_at(l, cell);
    long bad = 0, first = -1;
    for (long i = 0; i < CELL / 8; i++)
        if (at[i] != word(key, i) && bad++ == 0) first = i * 8;
    __sync_add_and_fetch(&ledger->checked, 1);
    if (bad) {
        char text[200];
        snprintf(text, sizeof text, "%s: cell %d: %ld of %d words differ, from byte %ld\n",
                 l->way->name, cell, bad, CELL / 8, first);
        complain(text);
        __sync_add_and_fetch(&ledger->wrong, 1);
    }
}
static void settle(struct lane *l, int cell, uint64_t key) { ledger->keys[l->number][cell] = key; }
static void stuck(struct lane *l, const char *call) {
    char text[200];
    snprintf(text, sizeof text, "%s: %s: %s\n", l->way->name, call, strerror(errno));
    complain(text);
    _exit(1);
}

/* -- stores ---------------------------------------------------------------------------------- */
static void by_store(struct lane *l, int cell) {
    uint64_t key = new_key();
    fill(cell_at(l, cell), key);
    settle(l, cell, key);
    rest(300);
}
static void by_restless_store(struct lane *l, int cell) { /* never asleep */
    uint64_t key = new_key();
    fill(cell_at(l, cell), key);
    settle(l, cell, key);
}
static void shared_area(struct lane *l) {
    l->area = mmap(0, AREA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}
static void huge_area(struct lane *l) { madvise(l->area, AREA, MADV_HUGEPAGE); }
static void merged_area(struct lane *l) { madvise(l->area, AREA, MADV_MERGEABLE); }
static void by_equal_store(struct lane *l, int cell) { /* for KSM: half of the cells are equal */
    uint64_t key = cell % 2 ? (1ull << 41) : new_key();
    if (ledger->keys[l->number][cell] == key) return rest(3000);
    fill(cell_at(l, cell), key);
    settle(l, cell, key);
    rest(3000);
}
static void by_swap(struct lane *l, int cell) {
    madvise(cell_at(l, (cell + 5) % CELLS), CELL, MADV_PAGEOUT);
    by_store(l, cell);
}

/* -- calls that map ---------------------------------------------------------------------------- */
static void by_mapping(struct lane *l, int cell) {
    char *at = cell_at(l, cell), *other;
    uint64_t key = ZERO;
    switch (rand_r(&dice) % 6) {
    case 0: /* a new mapping in its place */
        mmap(at, CELL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        break;
    case 1: madvise(at, CELL, MADV_DONTNEED); break;
    case 2: /* filled elsewhere and moved to its place */
        other = mmap(0, CELL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        key = new_key();
        fill(other, key);
        mremap(other, CELL, CELL, MREMAP_MAYMOVE | MREMAP_FIXED, at);
        break;
    case 3: /* given away; the kernel may take it until it is written to */
        madvise(at, CELL, MADV_FREE);
        key = new_key();
        fill(at, key);
        break;
    case 4:
        munmap(at, CELL);
        mmap(at, CELL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        madvise(at, CELL, MADV_POPULATE_WRITE);
        break;
    default:
        mprotect(at, CELL, PROT_READ);
        mprotect(at, CELL, PROT_READ | PROT_WRITE);
        key = new_key();
        fill(at, key);
    }
    settle(l, cell, key);
    rest(2000);
}
static void by_fork(struct lane *l, int cell) {
    pid_t child = fork();
    if (child == 0) {
        fill(cell_at(l, cell), 12345); /* its own copy */
        rest(20000);
        _exit(0);
    }
    by_store(l, cell);
    while (child > 0 && waitpid(child, 0, 0) < 0 && errno == EINTR);
    rest(20000);
}

/* -- calls that copy: a thread feeds a pipe or a socket slowly ----------------------------------- */
static void *feed(void *argument) {
    struct lane *l = argument;
    char *from = malloc(CELL);
    for (;; rest(500)) {
        if (!l->wanted) continue;
        fill(from, l->wanted);
        l->wanted = 0;
        for (long at = 0; at < CELL; at += 8192) {
            for (long n, done = 0; done < 8192; done += n > 0 ? n : 0)
                n = write(l->feed, from + at + done, 8192 - done);
            rest(5000);
        }
    }
    return 0;
}
static void feed_start(struct lane *l) { pthread_create(&l->feeder, 0, feed, l); }
static void pipe_start(struct lane *l) {
    int fds[2];
    if (pipe2(fds, O_CLOEXEC)) stuck(l, "pipe");
    l->fd = fds[0], l->feed = fds[1];
    feed_start(l);
}
static void socket_start(struct lane *l) {
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds)) stuck(l, "socketpair");
    l->fd = fds[0], l->feed = fds[1];
    feed_start(l);
}
static void receive(struct lane *l, int cell, long (*call)(struct lane *, char *, long)) {
    uint64_t key = new_key();
    l->wanted = key;
    for (long done = 0, n; done < CELL; done += n > 0 ? n : 0)
        if ((n = call(l, cell_at(l, cell) + done, CELL - done)) < 0 && errno != EINTR) stuck(l, "receive");
    settle(l, cell, key);
}
static long do_read(struct lane *l, char *at, long n) { return read(l->fd, at, n); }
static long do_readv(struct lane *l, char *at, long n) {
    struct iovec v[2] = {{at, n / 2}, {at + n / 2, n - n / 2}};
    return readv(l->fd, v, 2);
}
static long do_recvmsg(struct lane *l, char *at, long n) {
    struct iovec v = {at, n};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    return recvmsg(l->fd, &m, 0);
}
static long do_recvmmsg(struct lane *l, char *at, long n) {
    struct iovec v = {at, n};
    struct mmsghdr m = {.msg_hdr = {.msg_iov = &v, .msg_iovlen = 1}};
    int got = recvmmsg(l->fd, &m, 1, 0, 0);
    return got > 0 ? (long)m.msg_len : got;
}
static long do_recv(struct lane *l, char *at, long n) { return recv(l->fd, at, n, MSG_WAITALL); }
static void by_read(struct lane *l, int cell) { receive(l, cell, do_read); }
static void by_readv(struct lane *l, int cell) { receive(l, cell, do_readv); }
static void by_recv(struct lane *l, int cell) { receive(l, cell, do_recv); }
static void by_recvmsg(struct lane *l, int cell) { receive(l, cell, do_recvmsg); }
static void by_recvmmsg(struct lane *l, int cell) { receive(l, cell, do_recvmmsg); }
static long do_vmsplice(struct lane *l, char *at, long n) {
    struct iovec v = {at, n};
    return vmsplice(l->fd, &v, 1, 0);
}
static void by_vmsplice(struct lane *l, int cell) { receive(l, cell, do_vmsplice); }

/* -- calls that hold pages: files read past the cache -------------------------------------------- */
static void slow_start(struct lane *l) {
    if ((l->fd = open("slow/file", O_RDONLY | O_CLOEXEC)) < 0) stuck(l, "open");
}
static void read_file(struct lane *l, int cell, long (*call)(struct lane *, char *, long, long)) {
    long offset = (rand_r(&dice) % (FILE_SIZE / CELL)) * CELL;
    for (long done = 0, n; done < CELL; done += n > 0 ? n : 0)
        if ((n = call(l, cell_at(l, cell) + done, CELL - done, offset + done)) <= 0 && errno != EINTR)
            stuck(l, "read");
    settle(l, cell, offset / 8);
}
static long do_pread(struct lane *l, char *at, long n, long from) { return pread(l->fd, at, n, from); }
static long do_preadv(struct lane *l, char *at, long n, long from) {
    struct iovec v[2] = {{at, n / 2 & -4096}, {at + (n / 2 & -4096), n - (n / 2 & -4096)}};
    return preadv(l->fd, v, 2, from);
}
static void by_slow_pread(struct lane *l, int cell) { read_file(l, cell, do_pread); }
static void by_slow_preadv(struct lane *l, int cell) {
    read_file(l, cell, do_preadv);
    rest(400000); /* so that some rounds meet none */
}
static int open_direct(struct lane *l) {
    int fd = open("disk", O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd < 0) stuck(l, "open O_DIRECT");
    return fd;
}
static void by_direct(struct lane *l, int cell) {
    l->fd = open_direct(l);
    read_file(l, cell, do_pread);
    close(l->fd);
    rest(rand_r(&dice) % 300000);
}
static void own_table(struct lane *l, int cell) {
    unshare(CLONE_FILES); /* the leader does not have this descriptor */
    by_direct(l, cell);
}
static void by_aio(struct lane *l, int cell) {
    long offset = (rand_r(&dice) % (FILE_SIZE / CELL)) * CELL;
    aio_context_t context = 0;
    int fd = open_direct(l);
    struct iocb block = {.aio_lio_opcode = IOCB_CMD_PREAD, .aio_fildes = fd, .aio_nbytes = CELL,
                         .aio_buf = (uint64_t)cell_at(l, cell), .aio_offset = offset};
    struct iocb *blocks = &block;
    struct io_event event = {0};
    if (syscall(SYS_io_setup, 4, &context)) stuck(l, "io_setup");
    if (syscall(SYS_io_submit, context, 1, &blocks) != 1) stuck(l, "io_submit");
    struct timespec second = {1, 0};
    while (syscall(SYS_io_getevents, context, 1, 1, &event, &second) < 0 && errno == EINTR);
    syscall(SYS_io_destroy, context);
    close(fd);
    if (event.res == CELL) settle(l, cell, offset / 8);
    else by_store(l, cell); /* CRIU has restored the context without what was in flight */
    rest(rand_r(&dice) % 600000);
}

/* -- other processes that write ------------------------------------------------------------------ */
static void by_sibling(struct lane *l, int cell) { /* a child writes to its parent */
    uint64_t key = new_key();
    int status = 1;
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        char *own = mmap(0, CELL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        fill(own, key);
        for (long done = 0; done < CELL; done += 16384, rest(2000)) {
            struct iovec from = {own + done, 16384}, to = {cell_at(l, cell) + done, 16384};
            if (process_vm_writev(parent, &from, 1, &to, 1, 0) != 16384) _exit(1);
        }
        _exit(0);
    }
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR);
    if (status) return by_store(l, cell);
    settle(l, cell, key);
    rest(50000);
}
static void ask_other(struct lane *l, int cell) { /* the campaign's own process writes: poker.py */
    struct request *r = &requests[l->number];
    for (int tries = 0; tries < 3; tries++) {
        uint64_t number = (uint64_t)time(0) << 20 | (rand_r(&dice) & 0xFFFFF), key = new_key();
        r->address = (uint64_t)cell_at(l, cell), r->key = key, r->pid = getpid();
        __sync_synchronize();
        r->number = number;
        /* Until it is done, or the campaign has taken it back, as at a restore. */
        for (int wait = 0; wait < 20000 && r->number == number; wait++, rest(1000))
            if (r->done == number) {
                settle(l, cell, key);
                return rest(5000);
            }
    }
    r->number = r->done;
    rest(200000);
    by_store(l, cell); /* there is none */
}

static const struct way WAYS[] = {
    {"store", by_store, 0},
    {"restless", by_restless_store, 0},
    {"shared", by_store, shared_area},
    {"huge", by_store, huge_area},
    {"merged", by_equal_store, merged_area},
    {"swap", by_swap, 0},
    {"mapping", by_mapping, 0},
    {"fork", by_fork, 0},
    {"read", by_read, pipe_start},
    {"readv", by_readv, pipe_start},
    {"vmsplice", by_vmsplice, pipe_start},
    {"recv", by_recv, socket_start},
    {"recvmsg", by_recvmsg, socket_start},
    {"recvmmsg", by_recvmmsg, socket_start},
    {"slow-pread", by_slow_pread, slow_start},
    {"slow-pread-2", by_slow_pread, slow_start},
    {"slow-preadv", by_slow_preadv, slow_start},
    {"direct", by_direct, 0},
    {"own-table", own_table, 0},
    {"aio", by_aio, 0},
    {"sibling", by_sibling, 0},
    {"other", ask_other, 0},
    {0, 0, 0},
};

static void *run(void *argument) {
    struct lane *l = argument;
    dice = l->number + 1;
    for (int cell = 0;; cell = (cell + 1) % CELLS) {
        check(l, cell);
        l->way->write(l, cell);
        check(l, cell);
        if (cell % 8 == 7 || l->way->start == slow_start)
            for (int other = 0; other < CELLS; other++) check(l, other);
        if (cell % 8 == 7) ledger->rounds[l->number]++;
    }
    return 0;
}

/* The file that is read: its words follow from their places, as those of a cell from its key. */
static int make_file(const char *path) {
    FILE *file = fopen(path, "w");
    for (uint64_t i = 0; file && i < FILE_SIZE / 8; i++) {
        uint64_t value = word(i, 0);
        fwrite(&value, 8, 1, file);
    }
    return file && !fclose(file) ? 0 : 1;
}

int main(int count, char **names) {
    if (count == 3 && !strcmp(names[1], "--file")) return make_file(names[2]);
    static struct lane lanes[LANES];
    long lane_count = 0;
    int fd = open("requests", O_RDWR | O_CLOEXEC);
    ledger = mmap(0, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    requests = mmap(0, LANES * sizeof *requests, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (requests == MAP_FAILED) return perror("requests"), 1;
    close(fd);
    for (int i = 1; i < count && lane_count < LANES; i++)
        for (const struct way *w = WAYS; w->name; w++)
            if (!strcmp(w->name, names[i])) {
                struct lane *l = &lanes[lane_count];
                l->number = lane_count++, l->way = w;
                /* Apart, and each a mapping of its own. */
                l->area = mmap(0, AREA + (4 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                l->area = (char *)(((uintptr_t)l->area + (2 << 20) - 1) & -(2L << 20));
                mmap(l->area, AREA, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
                if (w->start) w->start(l);
                for (int cell = 0; cell < CELLS; cell++) {
                    uint64_t key = new_key();
                    fill(cell_at(l, cell), key);
                    settle(l, cell, key);
                }
            }
    for (long i = 0; i < lane_count; i++) pthread_create(&lanes[i].thread, 0, run, &lanes[i]);
    char space[64] = "", name[100], staged[110]; /* a copy is in a PID namespace of its own */
    for (;; rest(50000)) {
        char text[100];
        if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) return 1;
        snprintf(name, sizeof name, "status-%lu", strtoul(strchr(space, '[') + 1, 0, 10));
        snprintf(staged, sizeof staged, "%s.new", name);
        uint64_t least = UINT64_MAX;
        for (long i = 0; i < lane_count; i++)
            if (ledger->rounds[i] < least) least = ledger->rounds[i];
        int n = snprintf(text, sizeof text, "%d %lu %lu %lu\n", getpid(), least, ledger->checked, ledger->wrong);
        fd = open(staged, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        if (write(fd, text, n) != n) return 1;
        close(fd);
        rename(staged, name);
    }
}
