/* The stand-in's board: what plays the devices, and what each process publishes of its use of them.
 *
 * The board is the folder above that in which the library was found.  Its file `board` describes
 * driver and devices, its file `faults` says which calls go wrong, and each device has a folder,
 * named by its UUID, with one file per buffer.  `board` is read again by a restore, `faults` by
 * every call on another process.
 *
 * A process that has called cuInit has a thread named cuda-ADDRESS, the driver thread.  ADDRESS is
 * the page number of its `struct control`.  Others find the process by that alone, so they also
 * find it after a restore by CRIU, under another PID and in another PID namespace.
 */
#ifndef BOARD_H
#define BOARD_H

#include <stdint.h>
#include <sys/types.h>

#pragma GCC visibility push(hidden)

#define MAX_DEVICES 8
#define PAGE 4096
#define MAGIC 0x63756473
#define DRIVER_SIGNAL 62

enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum { NOTHING, LOCK, CHECKPOINT, RESTORE, UNLOCK, COMMANDS };

typedef struct {
    unsigned char bytes[16];
} Uuid;

struct device {
    Uuid uuid;
    int major, minor, mig;
    uint64_t total;
    char node[64], name[96];
};

struct board {
    char folder[256];
    int driver; /* CUDA version, 13000 for 13.0 */
    char release[32];
    char control_node[64], memory_node[64];
    int count;
    struct device devices[MAX_DEVICES];
};

struct pair {
    Uuid from, to;
};

/* `command` to `request` are written by the process that calls, all else by the process itself. */
struct control {
    uint32_t magic;
    int32_t state;
    uint32_t command, timeout_ms, pair_count;
    struct pair pairs[MAX_DEVICES];
    uint32_t request, done; /* equal when no command is pending */
    int32_t result;
    uint32_t contexts;
    Uuid used_device[MAX_DEVICES];
    uint64_t used_bytes[MAX_DEVICES];
};

/* Read the board; 0, or -1 where there is none. */
int board_read(struct board *board);
/* The device of this UUID, or NULL. */
struct device *board_find(struct board *board, const Uuid *uuid);
/* Write the 32 digits of a UUID. */
void uuid_text(const Uuid *uuid, char text[33]);
/* Find the driver thread of a process and read its control block: its TID, or -1. */
pid_t control_find(pid_t pid, struct control *control, uintptr_t *address);

typedef int CUresult;

#define RESULTS(ITEM) \
    ITEM(CUDA_SUCCESS, 0, "no error") \
    ITEM(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument") \
    ITEM(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory") \
    ITEM(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error") \
    ITEM(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected") \
    ITEM(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal") \
    ITEM(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context") \
    ITEM(CUDA_ERROR_OPERATING_SYSTEM, 304, "OS call failed or operation not supported on this OS") \
    ITEM(CUDA_ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state") \
    ITEM(CUDA_ERROR_NOT_READY, 600, "device not ready") \
    ITEM(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered") \
    ITEM(CUDA_ERROR_NOT_PERMITTED, 800, "operation not permitted") \
    ITEM(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported") \
    ITEM(CUDA_ERROR_UNKNOWN, 999, "unknown error")
#define CONSTANT(name, number, text) name = number,
enum { RESULTS(CONSTANT) };

extern int initialised; /* cuInit was called, and not in a parent */

#pragma GCC visibility pop

#endif
