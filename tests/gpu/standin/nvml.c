/* libnvidia-ml.so.1 for machines without a device: the board's devices and processes on them. */
#define _GNU_SOURCE
#include "board.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS,
    UNINITIALIZED,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE,
    DRIVER_NOT_LOADED = 9
};

typedef struct device *Handle;

struct memory {
    unsigned long long total, free, used;
};

struct process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

static struct board board;

int nvmlInit_v2(void) {
    return board_read(&board) ? DRIVER_NOT_LOADED : SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return nvmlInit_v2();
}

int nvmlShutdown(void) {
    return SUCCESS;
}

const char *nvmlErrorString(int result) {
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    }
    return "Unknown Error";
}

static int say(char *text, unsigned size, const char *said) {
    return (unsigned)snprintf(text, size, "%s", said) < size ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    return say(text, size, board.release);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = board.driver;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = board.count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *device) {
    if (index >= (unsigned)board.count)
        return INVALID_ARGUMENT;
    *device = &board.devices[index];
    return SUCCESS;
}

int nvmlDeviceGetName(Handle device, char *text, unsigned size) {
    return say(text, size, device->name);
}

int nvmlDeviceGetUUID(Handle device, char *text, unsigned size) {
    char digits[33], said[48];
    uuid_text(&device->uuid, digits);
    snprintf(said, sizeof said, "GPU-%.8s-%.4s-%.4s-%.4s-%.12s", digits, digits + 8, digits + 12,
             digits + 16, digits + 20);
    return say(text, size, said);
}

int nvmlDeviceGetMinorNumber(Handle device, unsigned *minor) {
    *minor = atoi(device->node + strcspn(device->node, "0123456789"));
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Handle device, unsigned *current, unsigned *pending) {
    *current = *pending = device->mig;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(Handle device, int *major, int *minor) {
    *major = device->major;
    *minor = device->minor;
    return SUCCESS;
}

/* Each process that has the device open now, at most `room` of them; the number of all. */
static unsigned processes_of(Handle device, struct process *list, unsigned room) {
    unsigned count = 0;
    DIR *folder = opendir("/proc");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        struct control control;
        uintptr_t address;
        pid_t pid = atoi(entry->d_name);
        if (pid <= 0 || control_find(pid, &control, &address) < 0 || control.state >= CHECKPOINTED)
            continue;
        for (uint32_t i = 0; i < control.contexts && i < MAX_DEVICES; i++)
            if (!memcmp(&control.used_device[i], &device->uuid, sizeof(Uuid)) && count++ < room)
                list[count - 1] = (struct process){pid, control.used_bytes[i], -1, -1};
    }
    if (folder)
        closedir(folder);
    return count;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned *count, struct process *list) {
    unsigned room = *count;
    *count = processes_of(device, list, room);
    return *count <= room ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetMemoryInfo(Handle device, struct memory *memory) {
    struct process list[256];
    unsigned count = processes_of(device, list, 256);
    memory->used = 0;
    for (unsigned i = 0; i < count && i < 256; i++)
        memory->used += list[i].used;
    memory->total = device->total;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
