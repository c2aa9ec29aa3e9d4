/* The calls on other processes, cuCheckpointProcess*.  A driver older than 570 has none of them.
 *
 * A command is written to the `struct control` of the other process, its driver thread gets a
 * signal, and the result is read there.  State and restore thread are only read.  No call returns
 * while the driver thread is stopped.
 */
#define _GNU_SOURCE
#include "board.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static void pause_ms(unsigned ms) {
    struct timespec left = {0, ms * 1000000L};
    nanosleep(&left, NULL);
}

static int peek(pid_t pid, uintptr_t address, void *value, size_t size) {
    struct iovec ours = {value, size}, theirs = {(void *)address, size};
    return process_vm_readv(pid, &ours, 1, &theirs, 1, 0) == (ssize_t)size ? 0 : -1;
}

static int poke(pid_t pid, uintptr_t address, void *value, size_t size) {
    struct iovec ours = {value, size}, theirs = {(void *)address, size};
    return process_vm_writev(pid, &ours, 1, &theirs, 1, 0) == (ssize_t)size ? 0 : -1;
}

/* Wait while a process's driver thread is stopped: the driver answers nothing for it then. */
static void await(pid_t pid, pid_t tid) {
    char path[64], line[512], state = 'T';
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", pid, tid);
    while (state == 'T' || state == 't') {
        FILE *file = fopen(path, "re");
        char *name = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
        state = name ? name[2] : 'X';
        if (file)
            fclose(file);
        pause_ms(1);
    }
}

static CUresult find(int pid, struct control *found, uintptr_t *address, pid_t *tid) {
    if (!initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (pid <= 0 || (kill(pid, 0) && errno == ESRCH))
        return CUDA_ERROR_INVALID_VALUE;
    if (kill(pid, 0))
        return CUDA_ERROR_NOT_PERMITTED;
    *tid = control_find(pid, found, address);
    if (*tid >= 0) {
        await(pid, *tid);
        *tid = control_find(pid, found, address);
    }
    return *tid < 0 ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

static CUresult order(int pid, int command, unsigned timeout_ms, const struct pair *pairs,
                      unsigned count) {
    struct control theirs;
    uintptr_t at;
    pid_t tid;
    struct board now;
    if (count > MAX_DEVICES)
        return CUDA_ERROR_INVALID_VALUE;
    if (board_read(&now) || now.driver < 12080)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = find(pid, &theirs, &at, &tid);
    if (result != CUDA_SUCCESS)
        return result;
    while (theirs.request != theirs.done) { /* a command that somebody gave up waiting for */
        pause_ms(2);
        if (peek(pid, at, &theirs, sizeof theirs))
            return CUDA_ERROR_OPERATING_SYSTEM;
    }
    theirs.command = command;
    theirs.timeout_ms = timeout_ms;
    theirs.pair_count = count;
    if (count)
        memcpy(theirs.pairs, pairs, count * sizeof *pairs);
    uint32_t request = theirs.request + 1, done;
    if (poke(pid, at + offsetof(struct control, command), &theirs.command,
             offsetof(struct control, request) - offsetof(struct control, command)) ||
        poke(pid, at + offsetof(struct control, request), &request, sizeof request) ||
        syscall(SYS_tgkill, pid, tid, DRIVER_SIGNAL))
        return CUDA_ERROR_OPERATING_SYSTEM;
    do {
        pause_ms(1);
        if (peek(pid, at + offsetof(struct control, done), &done, sizeof done))
            return CUDA_ERROR_OPERATING_SYSTEM; /* it has ended */
    } while (done != request);
    return peek(pid, at + offsetof(struct control, result), &theirs.result, sizeof theirs.result)
        ? CUDA_ERROR_OPERATING_SYSTEM
        : theirs.result;
}

static int zero(const void *memory, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (((const char *)memory)[i])
            return 0;
    return 1;
}

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

CUresult cuCheckpointProcessLock(int pid, struct lock_arguments *arguments) {
    if (arguments && !zero(&arguments->reserved0, sizeof *arguments - sizeof(unsigned)))
        return CUDA_ERROR_INVALID_VALUE;
    return order(pid, LOCK, arguments ? arguments->timeout_ms : 0, NULL, 0);
}

CUresult cuCheckpointProcessCheckpoint(int pid, uint64_t *reserved) {
    return reserved && !zero(reserved, 64) ? CUDA_ERROR_INVALID_VALUE
                                           : order(pid, CHECKPOINT, 0, NULL, 0);
}

CUresult cuCheckpointProcessRestore(int pid, struct restore_arguments *arguments) {
    if (!arguments)
        return order(pid, RESTORE, 0, NULL, 0);
    if (!zero(arguments->reserved, sizeof arguments->reserved) || arguments->reserved1)
        return CUDA_ERROR_INVALID_VALUE;
    return order(pid, RESTORE, 0, arguments->pairs, arguments->count);
}

CUresult cuCheckpointProcessUnlock(int pid, uint64_t *reserved) {
    return reserved && !zero(reserved, 64) ? CUDA_ERROR_INVALID_VALUE
                                           : order(pid, UNLOCK, 0, NULL, 0);
}

CUresult cuCheckpointProcessGetState(int pid, int *state) {
    struct control theirs;
    uintptr_t at;
    pid_t tid;
    CUresult result = find(pid, &theirs, &at, &tid);
    if (result == CUDA_SUCCESS)
        *state = theirs.state;
    return result;
}

CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    struct control theirs;
    uintptr_t at;
    pid_t found;
    CUresult result = find(pid, &theirs, &at, &found);
    if (result == CUDA_SUCCESS)
        *tid = found;
    return result;
}
