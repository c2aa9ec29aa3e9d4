/* libcuda.so.1 for machines without a device: as much of the driver as checkpoints of it need.
 *
 * Device memory is a file on the board, not memory of the process.  While it runs, the process
 * holds descriptors of character devices and a mapping of one.  Each call of the application
 * passes a gate. The driver thread closes it for a lock, and waits for calls and kernels that are
 * under way.  A checkpoint moves all buffers to private anonymous memory and closes descriptors
 * and mappings, so that CRIU can dump the process.  The driver thread then waits in sigwaitinfo.
 *
 * A child made by fork has descriptors and mappings, but no driver thread: it is not initialised.
 */
#define _GNU_SOURCE
#include "board.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>
#include <dirent.h>

typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;

#define DEVICE_ADDRESS 0x200600000UL /* where the device's mapping lies, always */
#define DEVICE_SPACE 0x200000UL
#define MAX_BUFFERS 512

struct context {
    int ordinal, users, fd;
};

struct buffer {
    CUdeviceptr address;
    uint64_t size, token; /* its file's name: PID and address may be those of a copy */
    int ordinal, managed;
    void *saved; /* contents, while there is no device */
};

static struct control control __attribute__((aligned(PAGE)));
int initialised;
static struct board board; /* as this process last read it */
static int visible_count, control_fd = -1, memory_fd = -1;
static Uuid visible[MAX_DEVICES]; /* devices by ordinal; a restore may change them */
static struct context contexts[MAX_DEVICES];
static struct buffer buffers[MAX_BUFFERS];
static CUdeviceptr next_address = 0x300000000;
static int exported; /* cuIpcGetMemHandle was called */
static uint64_t busy_until; /* when the kernels that were launched end, in milliseconds */
static unsigned calls[COMMANDS];
static __thread CUcontext current;

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER, tables = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER;
static int closed, active;

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000UL + now.tv_nsec / 1000000;
}

static void pause_ms(unsigned ms) {
    struct timespec left = {ms / 1000, ms % 1000 * 1000000L};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

/* -- buffers and devices ----------------------------------------------------------------------- */

static void buffer_path(const struct buffer *buffer, char path[320]) {
    char uuid[33];
    uuid_text(&visible[buffer->ordinal], uuid);
    snprintf(path, 320, "%s/%s/%d-%016lx", board.folder, uuid, getpid(), buffer->token);
}

static struct buffer *buffer_at(CUdeviceptr address, uint64_t size) {
    for (struct buffer *b = buffers; b < buffers + MAX_BUFFERS; b++)
        if (b->size && address >= b->address && address + size <= b->address + b->size)
            return b;
    return NULL;
}

/* Move all of `memory` to or from a buffer's file. */
static int transfer(const struct buffer *buffer, uint64_t offset, void *memory, uint64_t size,
                    int out, int flags) {
    char path[320];
    buffer_path(buffer, path);
    int fd = open(path, (out ? O_WRONLY : O_RDONLY) | O_CLOEXEC | flags, 0600);
    if (fd < 0)
        return -1;
    uint64_t done = 0;
    while (done < size) {
        ssize_t part = out ? pwrite(fd, (char *)memory + done, size - done, offset + done)
                           : pread(fd, (char *)memory + done, size - done, offset + done);
        if (part <= 0)
            break;
        done += part;
    }
    close(fd);
    return done == size ? 0 : -1;
}

/* Put a buffer on its device, with `size` bytes of contents at `offset`. */
static int place(struct buffer *buffer, uint64_t offset, void *memory, uint64_t size) {
    if (getrandom(&buffer->token, sizeof buffer->token, 0) != sizeof buffer->token)
        return -1;
    return transfer(buffer, offset, memory, size, 1, O_CREAT | O_EXCL);
}

/* Bytes of all buffers on a device, of every process. */
static uint64_t device_used(const Uuid *uuid) {
    char path[300], text[33];
    struct stat status;
    uint64_t used = 0;
    uuid_text(uuid, text);
    snprintf(path, sizeof path, "%s/%s", board.folder, text);
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        if (!fstatat(dirfd(folder), entry->d_name, &status, 0) && S_ISREG(status.st_mode))
            used += status.st_size;
    if (folder)
        closedir(folder);
    return used;
}

/* Publish which devices are used, and how much of each. */
static void publish(void) {
    uint32_t count = 0;
    for (int i = 0; i < visible_count; i++) {
        if (!contexts[i].users)
            continue;
        uint64_t bytes = 0;
        for (struct buffer *b = buffers; b < buffers + MAX_BUFFERS; b++)
            bytes += b->size && b->ordinal == i ? b->size : 0;
        control.used_device[count] = visible[i];
        control.used_bytes[count++] = bytes;
    }
    control.contexts = count;
}

static void *mapping_of(int ordinal) {
    return (void *)(DEVICE_ADDRESS + ordinal * DEVICE_SPACE);
}

/* Open and map the device of a context. */
static CUresult context_open(struct context *context) {
    struct device *device = board_find(&board, &visible[context->ordinal]);
    int flags = MAP_PRIVATE | MAP_FIXED_NOREPLACE; /* a shared one would show as /dev/zero */
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    context->fd = open(device->node, O_RDWR | O_CLOEXEC);
    if (context->fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    void *wanted = mapping_of(context->ordinal);
    void *got = mmap(wanted, DEVICE_SPACE, PROT_READ | PROT_WRITE, flags, memory_fd, 0);
    return got == wanted ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

static void devices_close(void) {
    for (int i = 0; i < visible_count; i++)
        if (contexts[i].users && contexts[i].fd >= 0) {
            munmap(mapping_of(i), DEVICE_SPACE);
            close(contexts[i].fd);
            contexts[i].fd = -1;
        }
    close(control_fd);
    close(memory_fd);
    control_fd = memory_fd = -1;
}

static CUresult devices_open(void) {
    CUresult result = CUDA_SUCCESS;
    control_fd = open(board.control_node, O_RDWR | O_CLOEXEC);
    memory_fd = open(board.memory_node, O_RDWR | O_CLOEXEC);
    if (control_fd < 0 || memory_fd < 0)
        result = CUDA_ERROR_OPERATING_SYSTEM;
    for (int i = 0; i < visible_count && result == CUDA_SUCCESS; i++)
        if (contexts[i].users)
            result = context_open(&contexts[i]);
    return result;
}

/* -- the driver thread ------------------------------------------------------------------------- */

static const char *const verbs[COMMANDS] = {"", "lock", "checkpoint", "restore", "unlock"};

/* What `faults` says about this call, "" when nothing: lines of VERB FAULT [pid=N] [n=N]. */
static void fault_of(int command, char fault[32]) {
    char path[300], line[200], verb[32], said[32];
    snprintf(path, sizeof path, "%s/faults", board.folder);
    FILE *file = fopen(path, "re");
    *fault = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%31s %31s", verb, said) != 2 || strcmp(verb, verbs[command]))
            continue;
        char *pid = strstr(line, " pid="), *n = strstr(line, " n=");
        if ((!pid || atoi(pid + 5) == getpid()) &&
            (!n || (unsigned)atoi(n + 3) == calls[command])) {
            strcpy(fault, said);
            break;
        }
    }
    if (file)
        fclose(file);
}

/* Add the call to the file `calls`: VERB PID. */
static void note(int command) {
    char path[300], line[64];
    snprintf(path, sizeof path, "%s/calls", board.folder);
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    int size = snprintf(line, sizeof line, "%s %d\n", verbs[command], getpid());
    if (fd < 0 || write(fd, line, size) != size)
        kill(getpid(), SIGABRT); /* a test would miss it */
    close(fd);
}

static CUresult lock(void) {
    uint64_t deadline = control.timeout_ms ? now_ms() + control.timeout_ms : UINT64_MAX;
    pthread_mutex_lock(&gate);
    closed = 1;
    while (active || now_ms() < busy_until) {
        if (now_ms() >= deadline) {
            closed = 0;
            pthread_cond_broadcast(&opened);
            pthread_mutex_unlock(&gate);
            return CUDA_ERROR_NOT_READY;
        }
        pthread_mutex_unlock(&gate);
        pause_ms(2);
        pthread_mutex_lock(&gate);
    }
    control.state = LOCKED;
    pthread_mutex_unlock(&gate);
    return CUDA_SUCCESS;
}

/* Let the calls go on, or fail. */
static void open_gate(int state) {
    pthread_mutex_lock(&gate);
    control.state = state;
    closed = 0;
    pthread_cond_broadcast(&opened);
    pthread_mutex_unlock(&gate);
}

static CUresult checkpoint(int half) {
    char path[320];
    for (struct buffer *b = buffers; b < buffers + MAX_BUFFERS; b++)
        if (b->size && b->managed)
            return CUDA_ERROR_NOT_SUPPORTED;
    for (int i = 0; i < visible_count; i++) {
        struct device *device = board_find(&board, &visible[i]);
        if (contexts[i].users && device && device->mig)
            return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (exported)
        return CUDA_ERROR_NOT_SUPPORTED;
    for (struct buffer *b = buffers; b < buffers + MAX_BUFFERS; b++) {
        if (!b->size)
            continue;
        b->saved = mmap(NULL, b->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        int bad = half || b->saved == MAP_FAILED || transfer(b, 0, b->saved, b->size, 0, 0);
        buffer_path(b, path);
        unlink(path);
        if (bad) {
            devices_close();
            control.state = FAILED;
            return CUDA_ERROR_UNKNOWN;
        }
    }
    devices_close();
    if (half) {
        control.state = FAILED;
        return CUDA_ERROR_UNKNOWN;
    }
    control.state = CHECKPOINTED;
    return CUDA_SUCCESS;
}

/* The devices to restore onto: `wanted`, by ordinal. */
static CUresult choose(Uuid wanted[MAX_DEVICES], const struct board *then) {
    if (control.pair_count && board.driver < 13000)
        return CUDA_ERROR_NOT_SUPPORTED;
    for (int i = 0; i < visible_count; i++) {
        uint32_t k = 0;
        while (k < control.pair_count && memcmp(&control.pairs[k].from, &visible[i], sizeof(Uuid)))
            k++;
        if (control.pair_count && k == control.pair_count)
            return CUDA_ERROR_INVALID_VALUE; /* each visible device must be named */
        wanted[i] = control.pair_count ? control.pairs[k].to : visible[i];
        struct device *now = board_find(&board, &wanted[i]);
        struct device *old = board_find((struct board *)then, &visible[i]);
        if (!contexts[i].users)
            continue;
        if (!now)
            return CUDA_ERROR_INVALID_VALUE;
        if (old &&
            (old->major != now->major || old->minor != now->minor || strcmp(old->name, now->name)))
            return CUDA_ERROR_NOT_SUPPORTED; /* another chip */
    }
    return CUDA_SUCCESS;
}

static CUresult restore(int half) {
    struct board then = board;
    Uuid wanted[MAX_DEVICES] = {0}, old[MAX_DEVICES];
    char path[320];
    if (board_read(&board)) {
        board = then;
        return CUDA_ERROR_NO_DEVICE;
    }
    CUresult result = choose(wanted, &then);
    memcpy(old, visible, sizeof old);
    if (result == CUDA_SUCCESS) {
        memcpy(visible, wanted, sizeof visible);
        result = devices_open();
    }
    for (struct buffer *b = buffers; b < buffers + MAX_BUFFERS && result == CUDA_SUCCESS; b++) {
        if (!b->size)
            continue;
        struct device *device = board_find(&board, &visible[b->ordinal]);
        if (device_used(&visible[b->ordinal]) + b->size > device->total)
            result = CUDA_ERROR_OUT_OF_MEMORY;
        else if (half || place(b, 0, b->saved, b->size))
            result = CUDA_ERROR_UNKNOWN;
    }
    if (half) {
        devices_close();
        control.state = FAILED;
        return CUDA_ERROR_UNKNOWN;
    }
    if (result != CUDA_SUCCESS) {
        for (struct buffer *b = buffers; b < buffers + MAX_BUFFERS && control_fd >= 0; b++)
            if (b->size) {
                buffer_path(b, path);
                unlink(path);
            }
        devices_close();
        memcpy(visible, old, sizeof visible);
        board = then;
        return result;
    }
    for (struct buffer *b = buffers; b < buffers + MAX_BUFFERS; b++)
        if (b->size) {
            munmap(b->saved, b->size);
            b->saved = NULL;
        }
    publish();
    control.state = LOCKED;
    return CUDA_SUCCESS;
}

static CUresult obey(int command) {
    static const int needed[COMMANDS] = {-1, RUNNING, LOCKED, CHECKPOINTED, LOCKED};
    char fault[32];
    unsigned ms;
    if (control.state != needed[command])
        return CUDA_ERROR_ILLEGAL_STATE;
    calls[command]++;
    note(command);
    for (fault_of(command, fault); !strcmp(fault, "hang"); fault_of(command, fault))
        pause_ms(20);
    if (sscanf(fault, "slow=%u", &ms) == 1)
        pause_ms(ms);
    if (!strcmp(fault, "die"))
        kill(getpid(), SIGKILL);
    if (!strcmp(fault, "fail-before"))
        return CUDA_ERROR_UNKNOWN;
    if (!strcmp(fault, "oom"))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!strcmp(fault, "notsupported"))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!strcmp(fault, "notready"))
        return CUDA_ERROR_NOT_READY;
    int half = !strcmp(fault, "half-done");
    CUresult result = CUDA_SUCCESS;
    switch (command) {
    case LOCK: result = lock(); break;
    case CHECKPOINT: result = checkpoint(half); break;
    case RESTORE: result = restore(half); break;
    default: open_gate(RUNNING);
    }
    while (!strcmp(fault, "hang-after")) {
        pause_ms(20);
        fault_of(command, fault);
    }
    return strcmp(fault, "fail-after") ? result : CUDA_ERROR_UNKNOWN;
}

static void *drive(void *started) {
    char name[32];
    sigset_t commands;
    snprintf(name, sizeof name, "cuda-%09lx", (unsigned long)&control / PAGE);
    sigemptyset(&commands);
    sigaddset(&commands, DRIVER_SIGNAL);
    prctl(PR_SET_NAME, name);
    control.magic = MAGIC;
    *(volatile int *)started = 1;
    for (;;) {
        sigwaitinfo(&commands, NULL); /* EINTR after a freeze: look, and wait again */
        uint32_t request = __atomic_load_n(&control.request, __ATOMIC_ACQUIRE);
        if (request == control.done)
            continue;
        control.result =
            control.command < COMMANDS ? obey(control.command) : CUDA_ERROR_INVALID_VALUE;
        __atomic_store_n(&control.done, request, __ATOMIC_RELEASE);
        if (control.state == FAILED) {
            pause_ms(
                200); /* the caller reads the result before the application ends by its errors */
            open_gate(FAILED);
        }
    }
    return NULL;
}

/* -- the application's calls ------------------------------------------------------------------- */

static void child_of_fork(void) {
    initialised = 0;
    control.magic = 0;
    closed = active = 0;
    pthread_mutex_init(&gate, NULL);
    pthread_mutex_init(&tables, NULL);
    pthread_cond_init(&opened, NULL);
}

CUresult cuInit(unsigned flags) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static volatile int started;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&once);
    if (!initialised && (flags || board_read(&board) || !board.count))
        result = flags ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NO_DEVICE;
    else if (!initialised) {
        sigset_t all, before;
        pthread_t thread;
        visible_count = board.count;
        for (int i = 0; i < visible_count; i++) {
            visible[i] = board.devices[i].uuid;
            contexts[i] = (struct context){i, 0, -1};
        }
        result = devices_open();
        if (result == CUDA_SUCCESS) {
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);
            int failed = pthread_create(&thread, NULL, drive, (void *)&started);
            pthread_sigmask(SIG_SETMASK, &before, NULL);
            while (!failed && !started)
                pause_ms(1);
            result = failed ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
        }
        if (result == CUDA_SUCCESS) {
            pthread_atfork(NULL, NULL, child_of_fork);
            initialised = 1;
        }
    }
    pthread_mutex_unlock(&once);
    return result;
}

/* Pass the gate: every call of the application that uses a device. */
static CUresult enter(int needs_context) {
    if (!initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (needs_context && !current)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&gate);
    while (closed)
        pthread_cond_wait(&opened, &gate);
    int failed = control.state == FAILED;
    active += !failed;
    pthread_mutex_unlock(&gate);
    return failed ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

static CUresult leave(CUresult result) {
    pthread_mutex_lock(&gate);
    active--;
    pthread_mutex_unlock(&gate);
    return result;
}

#define ENTER(needs_context) \
    do { \
        CUresult entered = enter(needs_context); \
        if (entered != CUDA_SUCCESS) \
            return entered; \
    } while (0)

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUresult result = CUDA_ERROR_INVALID_DEVICE;
    ENTER(0);
    pthread_mutex_lock(&tables);
    if (device >= 0 && device < visible_count) {
        result = contexts[device].users ? CUDA_SUCCESS : context_open(&contexts[device]);
        if (result == CUDA_SUCCESS) {
            contexts[device].users++;
            *context = &contexts[device];
        }
    }
    publish();
    pthread_mutex_unlock(&tables);
    return leave(result);
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(0);
    current = context;
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    CUresult result = cuDevicePrimaryCtxRetain(context, device);
    (void)flags;
    if (result == CUDA_SUCCESS)
        current = *context;
    return result;
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    ENTER(0);
    pthread_mutex_lock(&tables);
    if (context && context->users && !--context->users) {
        munmap(mapping_of(context->ordinal), DEVICE_SPACE);
        close(context->fd);
        context->fd = -1;
    }
    publish();
    pthread_mutex_unlock(&tables);
    current = current == context ? NULL : current;
    return leave(CUDA_SUCCESS);
}

static CUresult allocate(CUdeviceptr *address, size_t size, int managed) {
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    ENTER(1);
    pthread_mutex_lock(&tables);
    struct device *device = board_find(&board, &visible[current->ordinal]);
    struct buffer *b = buffers;
    while (b < buffers + MAX_BUFFERS && b->size)
        b++;
    if (!size)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (device && b < buffers + MAX_BUFFERS &&
             device_used(&device->uuid) + size <= device->total) {
        *b = (struct buffer){next_address, size, 0, current->ordinal, managed, NULL};
        next_address += (size + 0x3fffff) & ~0x1fffffUL;
        if (managed) { /* the CPU sees it, too: a mapping of the memory node */
            void *got = mmap((void *)b->address, size, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_FIXED_NOREPLACE, memory_fd, 0);
            result = got == (void *)b->address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        } else {
            char zero = 0;
            result = place(b, size - 1, &zero, 1) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
        }
        *address = b->address;
        if (result != CUDA_SUCCESS)
            b->size = 0;
    }
    publish();
    pthread_mutex_unlock(&tables);
    return leave(result);
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    return allocate(address, size, 0);
}

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned flags) {
    return flags == 1 || flags == 2 ? allocate(address, size, 1) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    char path[320];
    ENTER(1);
    pthread_mutex_lock(&tables);
    struct buffer *b = buffer_at(address, 1);
    if (b && b->managed)
        munmap((void *)b->address, b->size);
    else if (b) {
        buffer_path(b, path);
        unlink(path);
    }
    if (b)
        b->size = 0;
    publish();
    pthread_mutex_unlock(&tables);
    return leave(b ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

static CUresult copy(CUdeviceptr address, void *memory, size_t size, int out) {
    ENTER(1);
    pthread_mutex_lock(&tables);
    struct buffer *b = buffer_at(address, size);
    CUresult result = b ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (b && b->managed)
        memcpy(out ? (void *)address : memory, out ? memory : (void *)address, size);
    else if (b && transfer(b, address - b->address, memory, size, out, 0))
        result = CUDA_ERROR_ILLEGAL_ADDRESS; /* the device has lost it */
    pthread_mutex_unlock(&tables);
    return leave(result);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    return copy(to, (void *)from, size, 1);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    return copy(from, to, size, 0);
}

CUresult cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
    (void)flags;
    ENTER(1);
    *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return leave(*memory == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS);
}

CUresult cuIpcGetMemHandle(void *handle, CUdeviceptr address) {
    ENTER(1);
    memset(handle, 0, 64);
    memcpy(handle, &address, sizeof address);
    exported = 1;
    return leave(CUDA_SUCCESS);
}

/* Launch a kernel that takes `ms`. */
CUresult cuStandinRunKernel(unsigned ms) {
    ENTER(1);
    pthread_mutex_lock(&gate);
    uint64_t from = busy_until > now_ms() ? busy_until : now_ms();
    busy_until = from + ms;
    pthread_mutex_unlock(&gate);
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxSynchronize(void) {
    ENTER(1);
    while (now_ms() < busy_until)
        pause_ms(1);
    return leave(CUDA_SUCCESS);
}

/* -- queries ----------------------------------------------------------------------------------- */

#define NAME(name, number, text) \
    case number: *said = #name; return CUDA_SUCCESS;
#define TEXT(name, number, text) \
    case number: *said = text; return CUDA_SUCCESS;

CUresult cuGetErrorName(CUresult result, const char **said) {
    switch (result) { RESULTS(NAME) }
    *said = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult result, const char **said) {
    switch (result) { RESULTS(TEXT) }
    *said = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDriverGetVersion(int *version) {
    struct board now;
    *version = board_read(&now) ? 13000 : now.driver;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = visible_count;
    return initialised ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < visible_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static struct device *device_of(CUdevice device) {
    return initialised && device >= 0 && device < visible_count
        ? board_find(&board, &visible[device])
        : NULL;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    struct device *found = device_of(device);
    if (found)
        snprintf(name, size, "%s", found->name);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetUuid_v2(Uuid *uuid, CUdevice device) {
    struct device *found = device_of(device);
    if (found)
        *uuid = found->uuid;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetUuid(Uuid *uuid, CUdevice device) {
    return cuDeviceGetUuid_v2(uuid, device);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    struct device *found = device_of(device);
    if (found)
        *bytes = found->total;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    struct device *found = device_of(device);
    if (!found)
        return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case 75: *value = found->major; return CUDA_SUCCESS;
    case 76: *value = found->minor; return CUDA_SUCCESS;
    case 18:
    case 20:
    case 34:
    case 50: /* integrated, compute mode, PCI device and domain */ *value = 0; return CUDA_SUCCESS;
    case 33: *value = device + 1; return CUDA_SUCCESS; /* PCI bus */
    }
    return CUDA_ERROR_INVALID_VALUE;
}
