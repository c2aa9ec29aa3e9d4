/* The program that the bench dumps: a tree of processes with memory of known size and content.
 *
 *     target CONTROL PROCESSES BYTES
 *
 * BYTES of private memory are spread over PROCESSES processes: a root and its children.  Stretches of random bytes
 * take turns with stretches of random letters out of sixteen, which compress 2:1.  Each process knows the checksum of
 * its memory and answers, when asked, whether it still has that memory.
 *
 * CONTROL is a file of CONTROL_WORDS 64-bit words that all processes and the bench have mapped (see program.py for
 * its other half).  As a shared mapping of a file it is not part of a checkpoint: what the bench writes there while
 * the tree does not exist is there when it runs again.  The root ticks every millisecond: it records its largest
 * gap, and the moment of its first tick after the bench has set ARMED.
 *
 * Nobody has to end it: a tree whose deadline is over, and a child whose parent is gone, exit by themselves.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { COMMAND, KIND, CHANGERS, CHANGE_BYTES, CHANGE_RUN, SEED };
enum { DEADLINE = 6, TICKS, LARGEST_GAP, ARMED, RESUMED_AT, SLOTS = 16 };
enum { VERIFY = 1, CHANGE = 2 };
enum { PID, ANSWERED, GOOD, CHANGED, SLOT_WORDS };
enum { CONTROL_WORDS = 8192, STRETCH = 256 << 10, PAGE = 4096, TICK = 1000000 };
#define SECOND 1000000000ull

static volatile uint64_t *control;
static uint64_t *memory, words, sum, state, processes;

/* The monotonic clock of a restored tree goes on where it stood, so a moment that the bench shares is of the wall clock. */
static uint64_t now(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return t.tv_sec * SECOND + t.tv_nsec;
}

static uint64_t next_random(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state * 0x2545F4914F6CDD1Dull;
}

static void fill(uint64_t from, uint64_t to)
{
	for (uint64_t i = from; i < to; i++) {
		uint64_t r = next_random();
		memory[i] = (i * 8 / STRETCH) % 2 ? (r & 0x0f0f0f0f0f0f0f0full) | 0x4040404040404040ull : r;
	}
}

static uint64_t checksum(void)
{
	uint64_t h[4] = { 1, 2, 3, 4 };
	for (uint64_t i = 0; i < words; i++)
		h[i % 4] = (h[i % 4] ^ memory[i]) * 0x9E3779B97F4A7C15ull + i;
	return h[0] ^ h[1] * 3 ^ h[2] * 5 ^ h[3] * 7;
}

/* New contents in runs of whole pages, one somewhere in each of as many equal parts of the memory. */
static uint64_t change(uint64_t bytes, uint64_t run)
{
	uint64_t pages = words * 8 / PAGE, wanted = bytes / PAGE, done = 0;
	run = run / PAGE < wanted ? run / PAGE : wanted;
	if (!run)
		return 0;
	uint64_t runs = (wanted + run - 1) / run, part = pages / runs;
	for (uint64_t i = 0; i < runs; i++) {
		uint64_t length = wanted - done < run ? wanted - done : run;
		uint64_t start = i * part + (part > length ? next_random() % (part - length) : 0);
		fill(start * PAGE / 8, (start + length) * PAGE / 8);
		done += length;
	}
	return done * PAGE;
}

static void answer(uint64_t number, uint64_t *seen)
{
	volatile uint64_t *slot = control + SLOTS + number * SLOT_WORDS;
	uint64_t command = control[COMMAND];
	if (command == *seen)
		return;
	*seen = command;
	if (control[KIND] == CHANGE) {
		state = control[SEED] * 0x9E3779B97F4A7C15ull + number + 1;
		int chosen = (number + control[SEED]) % processes < control[CHANGERS];
		slot[CHANGED] = chosen ? change(control[CHANGE_BYTES], control[CHANGE_RUN]) : 0;
		sum = checksum();
	}
	slot[GOOD] = checksum() == sum;
	__sync_synchronize();
	slot[ANSWERED] = command;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	int fd = open(argv[1], O_RDWR);
	uint64_t number = 0;
	processes = strtoull(argv[2], NULL, 10);
	control = mmap(NULL, CONTROL_WORDS * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd < 0 || control == MAP_FAILED || processes < 1 || SLOTS + processes * SLOT_WORDS > CONTROL_WORDS)
		return 2;
	close(fd);
	pid_t root = getpid();
	for (uint64_t i = 1; i < processes && !number; i++) {
		pid_t child = fork();
		if (child < 0)
			return 3;
		if (child == 0)
			number = i;
	}
	words = strtoull(argv[3], NULL, 10) / processes / PAGE * PAGE / 8;
	memory = mmap(NULL, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return 3;
	state = 0x1234567 * (number + 1) + now(CLOCK_MONOTONIC);
	fill(0, words);
	sum = checksum();
	volatile uint64_t *slot = control + SLOTS + number * SLOT_WORDS;
	slot[PID] = getpid();
	slot[GOOD] = 1;
	__sync_synchronize();
	slot[ANSWERED] = 1;

	uint64_t seen = 1, before = now(CLOCK_MONOTONIC), second = before;
	while (now(CLOCK_REALTIME) < control[DEADLINE]) {
		if (number) {
			struct timespec wait = { .tv_sec = 1 };
			syscall(SYS_futex, control + COMMAND, FUTEX_WAIT, (uint32_t)seen, &wait, NULL, 0);
			if (getppid() != root)
				return 0;
			answer(number, &seen);
			continue;
		}
		struct timespec tick = { .tv_nsec = TICK };
		nanosleep(&tick, NULL);
		uint64_t t = now(CLOCK_MONOTONIC);
		control[TICKS]++;
		if (t - before > control[LARGEST_GAP])
			control[LARGEST_GAP] = t - before;
		if (control[ARMED]) {
			control[RESUMED_AT] = now(CLOCK_REALTIME);
			control[ARMED] = 0;
		}
		if (control[COMMAND] != seen || t - second > SECOND) {
			syscall(SYS_futex, control + COMMAND, FUTEX_WAKE, processes, NULL, NULL, 0);
			answer(0, &seen);
			second = t = now(CLOCK_MONOTONIC); /* an answer takes its time, which is no gap */
		}
		before = t;
	}
	return 0;
}
