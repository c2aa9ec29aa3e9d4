/* Programs that use a device: device_program MODE FOLDER [ARGUMENT].
 *
 *   counter MIB   one context, a buffer of MIB with a pattern and a counter in it
 *   forked MIB    a counter with two children forked after cuInit, which inherit descriptors and
 *                 a mapping
 *   two MIB       a parent without a device and two children, each a counter
 *   threads MIB   a counter with threads that touch the device's mapping as soon as they run in a
 *                 restored process, and so die there when it does not exist yet
 *   managed MIB   a counter in managed memory
 *   exported MIB  a counter whose buffer others may map (IPC memory)
 *   kernel MS     kernels of MS milliseconds, one after the other
 *   idle NODE     opens a device node, and has no context
 *   initialised   calls cuInit, and has no context
 *   controller    no program to dump: calls the driver for a test; commands on stdin
 *
 * FOLDER/out says how far it is, in 64 bytes: "COUNT ok" or "COUNT wrong WHAT", after which it
 * ends; children and threads write out.0 and out.1.  The process that writes `out` makes
 * FOLDER/ready with its PID when all is set up.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult, CUdevice;
typedef void *CUcontext;
typedef uint64_t CUdeviceptr;
struct pair {
    unsigned char from[16], to[16];
};
struct lock_arguments {
    unsigned timeout_ms, reserved0;
    uint64_t reserved1[7];
};
struct restore_arguments {
    struct pair *pairs;
    unsigned count;
    char reserved[52 - sizeof(void *)];
    uint64_t reserved1;
};

CUresult cuInit(unsigned);
CUresult cuGetErrorName(CUresult, const char **);
CUresult cuCtxCreate_v2(CUcontext *, unsigned, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize(void);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemAllocManaged(CUdeviceptr *, size_t, unsigned);
CUresult cuMemcpyHtoD_v2(CUdeviceptr, const void *, size_t);
CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);
CUresult cuIpcGetMemHandle(void *, CUdeviceptr);
CUresult cuStandinRunKernel(unsigned);
CUresult cuCheckpointProcessLock(int, struct lock_arguments *);
CUresult cuCheckpointProcessCheckpoint(int, void *);
CUresult cuCheckpointProcessRestore(int, struct restore_arguments *);
CUresult cuCheckpointProcessUnlock(int, void *);
CUresult cuCheckpointProcessGetState(int, int *);
CUresult cuCheckpointProcessGetRestoreThreadId(int, int *);

#define SLICE 8192 /* words that are looked at each time */
#define MAPPING ((volatile uint64_t *)0x200600000) /* of device 0 */

static const char *folder;

static int output(const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
}

static void say(int fd, uint64_t count, const char *what, const char *more) {
    char line[128];
    int used = snprintf(line, sizeof line, "%lu %s %s", count, what, more);
    memset(line + used, ' ', sizeof line - used);
    line[63] = '\n';
    if (pwrite(fd, line, 64, 0) != 64)
        exit(3);
}

static void ready(void) {
    char path[512], said[512];
    snprintf(path, sizeof path, "%s/ready.new", folder);
    FILE *file = fopen(path, "w");
    fprintf(file, "%d", getpid());
    fclose(file);
    snprintf(said, sizeof said, "%s/ready", folder);
    rename(path, said);
}

static void rest(void) {
    struct timespec time = {0, 10 * 1000000};
    nanosleep(&time, NULL);
}

/* End the program when the driver says that a call failed. */
static void must(CUresult result, int fd, uint64_t count) {
    const char *name = "?";
    if (!result)
        return;
    cuGetErrorName(result, &name);
    say(fd, count, "wrong", name);
    exit(2);
}

static uint64_t pattern(uint64_t word) {
    return word * 0x9e3779b97f4a7c15 ^ word >> 7;
}

static void context(int fd) {
    CUcontext made;
    must(cuInit(0), fd, 0);
    must(cuCtxCreate_v2(&made, 0, 0), fd, 0);
}

/* Count in word 0 of the buffer, and compare a slice of it with the pattern each time. */
static void count(int fd, uint64_t mib, int managed, int exported, void (*prepared)(void)) {
    uint64_t words = mib << 17, i = 0;
    static uint64_t slice[SLICE];
    CUdeviceptr at;
    unsigned char handle[64];
    must(managed ? cuMemAllocManaged(&at, mib << 20, 1) : cuMemAlloc_v2(&at, mib << 20), fd, 0);
    for (uint64_t from = 0; from < words; from += SLICE) {
        for (uint64_t k = 0; k < SLICE; k++)
            slice[k] = from + k ? pattern(from + k) : 0;
        must(cuMemcpyHtoD_v2(at + from * 8, slice, sizeof slice), fd, 0);
    }
    if (exported)
        must(cuIpcGetMemHandle(handle, at), fd, 0);
    prepared();
    for (;;) {
        uint64_t on_device, from = i * SLICE % words;
        must(cuMemcpyDtoH_v2(&on_device, at, sizeof on_device), fd, i);
        if (on_device != i) {
            say(fd, i, "wrong", "counter");
            exit(1);
        }
        i++;
        must(cuMemcpyHtoD_v2(at, &i, sizeof i), fd, i);
        must(cuMemcpyDtoH_v2(slice, at + from * 8, sizeof slice), fd, i);
        for (uint64_t k = 0; k < SLICE; k++)
            if (slice[k] != (from + k ? pattern(from + k) : i)) {
                say(fd, i, "wrong", "pattern");
                exit(1);
            }
        say(fd, i, "ok", "");
        rest();
    }
}

/* Ready when the two parts of the program have written something, too. */
static void all_ready(void) {
    char path[512];
    struct stat status;
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/out.%d", folder, i);
        while (stat(path, &status) || !status.st_size)
            rest();
    }
    ready();
}

static void nothing(void) {
}

/* Count without a device. */
static void work(int fd) {
    for (uint64_t i = 1;; i++) {
        say(fd, i, "ok", "");
        rest();
    }
}

static void fork_workers(void) {
    for (int i = 0; i < 2; i++)
        if (!fork())
            work(output(i ? "out.1" : "out.0"));
    all_ready();
}

static uint64_t start_time(void) {
    char text[1024] = "";
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
        exit(3);
    close(fd);
    char *field = strrchr(text, ')');
    for (int i = 0; i < 20; i++)
        field = strchr(field + 1, ' ');
    return strtoull(field, NULL, 10);
}

static void *touch(void *fd) {
    uint64_t born = start_time(), touched = 0;
    for (uint64_t i = 1;; i++) {
        uint64_t now = start_time();
        if (now != born) { /* restored: look at the device at once */
            touched += *MAPPING == 0;
            born = now;
        }
        char more[32];
        snprintf(more, sizeof more, "touched %lu", touched);
        say((int)(intptr_t)fd, i, "ok", more);
        rest();
    }
    return NULL;
}

static void start_threads(void) {
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, touch, (void *)(intptr_t)output(i ? "out.1" : "out.0")))
            exit(3);
    }
    all_ready();
}

/* -- the controller ---------------------------------------------------------------------------- */

static int restore(int pid, char *pairs) {
    struct pair list[8];
    struct restore_arguments arguments = {list, 0, {0}, 0};
    /* OLD=NEW, digits of UUIDs */
    for (char *pair = strtok(pairs, " \n"); pair; pair = strtok(NULL, " \n")) {
        for (int i = 0; i < 16; i++) {
            sscanf(pair + 2 * i, "%2hhx", &list[arguments.count].from[i]);
            sscanf(pair + 33 + 2 * i, "%2hhx", &list[arguments.count].to[i]);
        }
        arguments.count++;
    }
    return cuCheckpointProcessRestore(pid, arguments.count ? &arguments : NULL);
}

/* Commands VERB PID [ARGUMENTS]; each answer is NUMBER NAME VALUE. */
static int control(void) {
    char line[1024], verb[32];
    int pid, used;
    int begun = cuInit(0);
    while (fgets(line, sizeof line, stdin)) {
        int value = -1, result = begun;
        const char *name = "?";
        if (sscanf(line, "%31s %d%n", verb, &pid, &used) != 2)
            return 2;
        if (begun)
            ;
        else if (!strcmp(verb, "state"))
            result = cuCheckpointProcessGetState(pid, &value);
        else if (!strcmp(verb, "thread"))
            result = cuCheckpointProcessGetRestoreThreadId(pid, &value);
        else if (!strcmp(verb, "lock")) {
            struct lock_arguments arguments = {.timeout_ms = atoi(line + used)};
            result = cuCheckpointProcessLock(pid, &arguments);
        } else if (!strcmp(verb, "checkpoint"))
            result = cuCheckpointProcessCheckpoint(pid, NULL);
        else if (!strcmp(verb, "restore"))
            result = restore(pid, line + used);
        else if (!strcmp(verb, "unlock"))
            result = cuCheckpointProcessUnlock(pid, NULL);
        else
            return 2;
        cuGetErrorName(result, &name);
        printf("%d %s %d\n", result, name, value);
        fflush(stdout);
    }
    return 0;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "", *argument = argc > 3 ? argv[3] : "1";
    uint64_t mib = atoi(argument);
    if (!strcmp(mode, "controller"))
        return control();
    if (argc < 3)
        return 2;
    folder = argv[2];
    if (!strcmp(mode, "two")) {
        for (int i = 0; i < 2; i++)
            if (!fork()) {
                int fd = output(i ? "out.1" : "out.0");
                context(fd);
                count(fd, mib, 0, 0, nothing);
            }
        all_ready();
        work(output("out"));
    }
    int fd = output("out");
    if (!strcmp(mode, "idle")) {
        if (open(argument, O_RDWR | O_CLOEXEC) < 0)
            return 3;
        ready();
        work(fd);
    }
    if (!strcmp(mode, "initialised")) {
        must(cuInit(0), fd, 0);
        ready();
        work(fd);
    }
    context(fd);
    if (!strcmp(mode, "kernel")) {
        ready();
        for (uint64_t i = 1;; i++) {
            must(cuStandinRunKernel(atoi(argument)), fd, i);
            must(cuCtxSynchronize(), fd, i);
            say(fd, i, "ok", "");
        }
    }
    void (*prepared)(void) = ready;
    if (!strcmp(mode, "forked"))
        prepared = fork_workers;
    if (!strcmp(mode, "threads"))
        prepared = start_threads;
    count(fd, mib, !strcmp(mode, "managed"), !strcmp(mode, "exported"), prepared);
}
