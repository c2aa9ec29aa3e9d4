/* Memory that is changed in every way while it arrives: written, discarded, unmapped, moved, shrunk, protected, forked, by several
 * threads at random, each in a part of its own; every page is compared with what it has to be.
 * Arguments: FOLDER SEED STEPS MIB: see animal.py; begins when FOLDER has a file "go".
 *            - SEED STEPS MIB FD: the memory is not filled but registered with a userfaultfd, which is sent on the socket FD, then
 *            the address and the size of each part; begins when a byte comes, and writes 0 or what is wrong to standard output. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define THREADS 3
#define CHILDREN 2
#define RUN 24
#define MARK 64 /* the offset of what is written to a page */

struct page {
	uint8_t mapped, protected;
	uint64_t home; /* every word of it, 0 for zeros */
	uint64_t mark; /* 0: none was written */
};

struct part {
	char *base;
	size_t pages; /* that are filled; there is room for twice as many */
	struct page *state;
	uint64_t random;
	int children;
};

static struct part parts[THREADS];
static long steps;
static char wrong[512];
/* Between two calls of a move its old place is free: no stack may be made there. */
static pthread_barrier_t all_there;

static uint64_t rnd(struct part *p, uint64_t limit)
{
	p->random = p->random * 6364136223846793005ull + 1442695040888963407ull;
	return (p->random >> 33) % limit;
}

static int bad(struct part *p, size_t at, const char *what, uint64_t found, uint64_t wanted)
{
	snprintf(wrong, sizeof(wrong), "part %d page %zu: %s: %#lx, not %#lx", (int)(p - parts), at, what, (long)found, (long)wanted);
	dprintf(2, "%s\n", wrong);
	return 1;
}

static int check(struct part *p, size_t at, size_t count)
{
	for (size_t i = at; i < at + count; i++) {
		struct page *page = &p->state[i];
		volatile uint64_t *words = (volatile uint64_t *)(p->base + i * PAGE);

		if (!page->mapped)
			continue;
		for (size_t w = 0; w < PAGE / 8; w++) {
			uint64_t wanted = w * 8 == MARK && page->mark ? page->mark : page->home;

			if (words[w] != wanted)
				return bad(p, i, "content", words[w], wanted);
		}
	}
	return 0;
}

static void reserve(struct part *p, size_t at, size_t count)
{
	if (mmap(p->base + at * PAGE, count * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
	    MAP_FAILED)
		abort();
	memset(&p->state[at], 0, count * sizeof(struct page));
}

static int all_mapped(struct part *p, size_t at, size_t count)
{
	for (size_t i = at; i < at + count; i++)
		if (!p->state[i].mapped)
			return 0;
	return 1;
}

static void move(struct part *p, size_t from, size_t to, size_t count)
{
	size_t kind = rnd(p, 4), length = count, flags = MREMAP_MAYMOVE | MREMAP_FIXED;
	struct page moved[RUN];

	if (kind == 1)
		length = 1 + rnd(p, count);
	else if (kind == 2)
		flags |= MREMAP_DONTUNMAP;
	/* Of several mappings none is moved, or, since Linux 6.17, the first ones. */
	if (mremap(p->base + from * PAGE, count * PAGE, length * PAGE, flags, p->base + to * PAGE) == MAP_FAILED) {
		reserve(p, from, count);
		reserve(p, to, length);
		return;
	}
	memcpy(moved, &p->state[from], count * sizeof(struct page));
	if (kind == 2) {
		for (size_t i = from; i < from + count; i++)
			p->state[i].home = p->state[i].mark = 0;
	} else {
		reserve(p, from, count);
	}
	memcpy(&p->state[to], moved, length * sizeof(struct page));
}

static void change(struct part *p, size_t at, size_t count)
{
	char *start = p->base + at * PAGE;
	struct page *state = &p->state[at];

	switch (rnd(p, 8)) {
	case 0:
		if (all_mapped(p, at, count) && !madvise(start, count * PAGE, MADV_DONTNEED))
			for (size_t i = 0; i < count; i++)
				state[i].home = state[i].mark = 0;
		break;
	case 1:
		if (munmap(start, count * PAGE))
			abort();
		reserve(p, at, count);
		break;
	case 2:
		if (mmap(start, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
			abort();
		memset(state, 0, count * sizeof(*state));
		for (size_t i = 0; i < count; i++)
			state[i].mapped = 1;
		break;
	case 3:
		if (all_mapped(p, at, count)) {
			int protected = rnd(p, 2);

			if (mprotect(start, count * PAGE, PROT_READ | (protected ? 0 : PROT_WRITE)))
				abort();
			for (size_t i = 0; i < count; i++)
				state[i].protected = protected;
		}
		break;
	case 4:
	case 5: {
		size_t to = rnd(p, 2 * p->pages - count);

		if (all_mapped(p, at, count) && (to + count <= at || at + count <= to))
			move(p, at, to, count);
		break;
	}
	default:
		for (size_t i = 0; i < count; i++)
			if (state[i].mapped && !state[i].protected)
				*(uint64_t *)(start + i * PAGE + MARK) = state[i].mark = rnd(p, 1u << 30) + 1;
	}
}

static int attack(struct part *p, long number)
{
	for (long step = 0; step < number; step++) {
		size_t count = 1 + rnd(p, RUN), at = rnd(p, 2 * p->pages - count);

		change(p, at, count);
		at = rnd(p, 2 * p->pages - count);
		if (check(p, at, count))
			return 1;
	}
	return 0;
}

static int collect(struct part *p)
{
	int status;

	while (p->children) {
		if (wait(&status) < 0)
			return 0;
		p->children--;
		if (status) {
			snprintf(wrong + strlen(wrong), sizeof(wrong) - strlen(wrong), " a child ended with %#x", status);
			return 1;
		}
	}
	return 0;
}

/* A child knows one part. Its own steps must not reach its parent. */
static void breed(struct part *p)
{
	pid_t child = fork();

	if (child < 0)
		return;
	if (!child) {
		p->children = 0;
		if (attack(p, steps / 8) || check(p, 0, 2 * p->pages))
			_exit(1);
		_exit(0);
	}
	p->children++;
}

static void *work(void *argument)
{
	struct part *p = argument;
	int forks = p == parts; /* wait() is of all threads */

	pthread_barrier_wait(&all_there);
	for (int round = 0; round < 8; round++) {
		if (forks && round < 2 * CHILDREN) {
			breed(p);
			if (p->children == CHILDREN && collect(p))
				return p;
		}
		if (attack(p, steps / 8))
			return p;
	}
	if (check(p, 0, 2 * p->pages) || (forks && collect(p)))
		return p;
	return NULL;
}

static int attack_all(void)
{
	pthread_t threads[THREADS];
	void *failed, *any = NULL;

	pthread_barrier_init(&all_there, NULL, THREADS);
	for (int i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, work, &parts[i]))
			abort();
	for (int i = 0; i < THREADS; i++) {
		pthread_join(threads[i], &failed);
		any = any ?: failed;
	}
	return any != NULL;
}

static void make(uint64_t seed, size_t mib)
{
	for (int i = 0; i < THREADS; i++) {
		struct part *p = &parts[i];

		p->pages = (mib << 20) / PAGE / THREADS;
		p->random = seed * 1000003 + i;
		p->state = calloc(2 * p->pages, sizeof(struct page));
		p->base = mmap(NULL, 2 * p->pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (!p->state || p->base == MAP_FAILED ||
		    mmap(p->base, p->pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
			abort();
		for (size_t page = 0; page < p->pages; page++) {
			p->state[page].mapped = 1;
			p->state[page].home = (uint64_t)p->base + page * PAGE;
		}
	}
}

static void fill(void)
{
	for (int i = 0; i < THREADS; i++)
		for (size_t page = 0; page < parts[i].pages; page++)
			for (size_t w = 0; w < PAGE / 8; w++)
				((uint64_t *)(parts[i].base + page * PAGE))[w] = parts[i].state[page].home;
}

static void hand_over(int channel)
{
	struct uffdio_api api = { .api = UFFD_API,
				  .features = UFFD_FEATURE_EVENT_FORK | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_UNMAP |
					      UFFD_FEATURE_EVENT_REMOVE };
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	uint64_t where[2 * THREADS];
	char room[CMSG_SPACE(sizeof(int))] = { 0 }, byte;
	struct iovec iov = { where, sizeof(where) };
	struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room) };
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);

	if (fd < 0 || ioctl(fd, UFFDIO_API, &api))
		abort();
	for (int i = 0; i < THREADS; i++) {
		struct uffdio_register asked = { .range = { (uint64_t)parts[i].base, parts[i].pages * PAGE },
						 .mode = UFFDIO_REGISTER_MODE_MISSING };

		if (ioctl(fd, UFFDIO_REGISTER, &asked))
			abort();
		where[2 * i] = asked.range.start;
		where[2 * i + 1] = asked.range.len;
	}
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(head), &fd, sizeof(fd));
	if (sendmsg(channel, &message, 0) < 0)
		abort();
	close(fd);
	if (read(channel, &byte, 1) != 1)
		exit(2);
}

static void report(const char *folder, int number, int failed)
{
	char path[4096], made[4096];
	FILE *file;

	snprintf(path, sizeof(path), "%s/report-%d.json", folder, number);
	snprintf(made, sizeof(made), "%s/report.new", folder);
	file = fopen(made, "w");
	if (!file)
		abort();
	fprintf(file, "{\"ok\": %s, \"failures\": [\"%s\"]}", failed ? "false" : "true", wrong);
	fclose(file);
	rename(made, path);
}

int main(int count, char **words)
{
	char path[4096];
	int failed, number;
	sigset_t asked;

	if (count < 5)
		return 2;
	steps = atol(words[3]);
	make(strtoull(words[2], NULL, 10), strtoull(words[4], NULL, 10));
	if (count > 5) {
		hand_over(atoi(words[5]));
		failed = attack_all();
		puts(failed ? wrong : "0");
		return failed;
	}
	fill();
	sigemptyset(&asked);
	sigaddset(&asked, SIGUSR1);
	sigprocmask(SIG_BLOCK, &asked, NULL);
	snprintf(path, sizeof(path), "%s/ready", words[1]);
	close(open(path, O_CREAT | O_WRONLY, 0600));
	snprintf(path, sizeof(path), "%s/go", words[1]);
	while (access(path, F_OK))
		usleep(1000);
	failed = attack_all();
	for (int reports = 1;; reports++) {
		sigwait(&asked, &number);
		report(words[1], reports, failed);
	}
}
