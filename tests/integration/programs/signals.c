/* Signals and timers as only C sets them: an alternate stack, POSIX timers, queued real-time signals with values (for the process and
 * for a thread), masks and threads inside futex, nanosleep, poll and read.
 * Protocol: see animal.py. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char *folder;
static char failures[8192];
static char stack[64 * 1024];
static int queued = 1;
static int pipes[2];
static atomic_int ran_on_stack, wakeups[8];
static atomic_long ticks;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static int generation;
static timer_t periodic, distant;

static void fail(const char *format, ...)
{
	va_list list;
	size_t used = strlen(failures);

	va_start(list, format);
	used += snprintf(failures + used, sizeof(failures) - used, "%s\"", used ? "," : "");
	used += vsnprintf(failures + used, sizeof(failures) - used, format, list);
	snprintf(failures + used, sizeof(failures) - used, "\"");
	va_end(list);
}

static void on_alternate(int number)
{
	char here;

	ran_on_stack = &here >= stack && &here < stack + sizeof(stack) ? 1 : -1;
	(void)number;
}

static void on_tick(int number, siginfo_t *info, void *context)
{
	if (info->si_value.sival_int == 4711)
		ticks++;
	(void)number, (void)context;
}

static void *in_condition(void *unused)
{
	pthread_mutex_lock(&mutex);
	for (int seen = 0;; seen = generation) {
		while (generation == seen)
			pthread_cond_wait(&condition, &mutex);
		wakeups[0]++;
	}
	return unused;
}

static void *in_sleep(void *unused)
{
	struct timespec second = { .tv_nsec = 50 * 1000 * 1000 };

	for (;;) {
		while (nanosleep(&second, NULL) && errno == EINTR)
			;
		wakeups[1]++;
	}
	return unused;
}

static void *in_read(void *unused)
{
	char byte;

	while (read(pipes[0], &byte, 1) == 1)
		wakeups[2]++;
	fail("read: %m");
	return unused;
}

static void *in_poll(void *unused)
{
	struct pollfd wait = { .fd = pipes[1], .events = 0 };

	for (;;) {
		poll(&wait, 1, 100);
		wakeups[3]++;
	}
	return unused;
}

static void *with_pending(void *unused)
{
	sigset_t set;
	siginfo_t info;
	union sigval value = { .sival_int = 99 };

	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN + 5);
	pthread_sigmask(SIG_BLOCK, &set, NULL);
	pthread_sigqueue(pthread_self(), SIGRTMIN + 5, value);
	wakeups[4] = 1;
	pthread_mutex_lock(&mutex);
	while (!generation)
		pthread_cond_wait(&condition, &mutex);
	pthread_mutex_unlock(&mutex);
	wakeups[5] = sigwaitinfo(&set, &info) == SIGRTMIN + 5 ? info.si_value.sival_int : -errno;
	for (;;)
		pause();
	return unused;
}

static int reached(atomic_int *counter, int wanted)
{
	struct timespec moment = { .tv_nsec = 1000 * 1000 };

	for (int i = 0; i < 20000 && *counter < wanted; i++)
		nanosleep(&moment, NULL);
	return *counter >= wanted;
}

static void check(void)
{
	stack_t alternate;
	struct itimerspec left;
	sigset_t set;
	siginfo_t info;
	int before[8];
	long ticked = ticks;
	struct timespec moment = { .tv_nsec = 1000 * 1000 };

	for (int i = 0; i < 8; i++)
		before[i] = wakeups[i];
	sigaltstack(NULL, &alternate);
	if (alternate.ss_sp != stack || alternate.ss_size != sizeof(stack))
		fail("alternate stack is %p, %zu", alternate.ss_sp, alternate.ss_size);
	ran_on_stack = 0;
	raise(SIGUSR2);
	if (ran_on_stack != 1)
		fail("handler ran off the alternate stack");
	for (int i = 0; i < 20000 && ticks < ticked + 2; i++)
		nanosleep(&moment, NULL);
	if (ticks < ticked + 2)
		fail("the POSIX timer does not tick");
	timer_gettime(distant, &left);
	if (left.it_value.tv_sec < 3000 || left.it_value.tv_sec > 3600 || left.it_interval.tv_sec != 11)
		fail("distant timer: %ld, %ld", (long)left.it_value.tv_sec, (long)left.it_interval.tv_sec);
	if (queued) {
		sigemptyset(&set);
		sigaddset(&set, SIGRTMIN + 3);
		for (int i = 1; i <= 3; i++)
			if (sigwaitinfo(&set, &info) < 0 || info.si_value.sival_int != i)
				fail("queued signal %d carries %d", i, info.si_value.sival_int);
		if (sigtimedwait(&set, &info, &moment) >= 0)
			fail("a queued signal came twice");
		queued = 0;
	}
	pthread_mutex_lock(&mutex);
	generation++;
	pthread_cond_broadcast(&condition);
	pthread_mutex_unlock(&mutex);
	if (write(pipes[1], "x", 1) != 1)
		fail("write: %m");
	if (!reached(&wakeups[0], before[0] + 1))
		fail("thread in a condition variable sleeps on");
	if (!reached(&wakeups[1], before[1] + 2))
		fail("thread in nanosleep sleeps on");
	if (!reached(&wakeups[2], before[2] + 1))
		fail("thread in read reads no more");
	if (!reached(&wakeups[3], before[3] + 2))
		fail("thread in poll polls no more");
	if (!reached(&wakeups[5], 1) || wakeups[5] != 99)
		fail("signal queued for a thread carries %d", wakeups[5]);
}

static void publish(const char *temporary, const char *name, const char *format, ...)
{
	char from[512], to[512];
	va_list list;
	FILE *file;

	snprintf(from, sizeof(from), "%s/%s", folder, temporary);
	snprintf(to, sizeof(to), "%s/%s", folder, name);
	file = fopen(from, "w");
	va_start(list, format);
	vfprintf(file, format, list);
	va_end(list);
	fclose(file);
	rename(from, to);
}

int main(int count, char **arguments)
{
	stack_t alternate = { .ss_sp = stack, .ss_size = sizeof(stack) };
	struct sigaction on_stack = { .sa_handler = on_alternate, .sa_flags = SA_ONSTACK };
	struct sigaction tick = { .sa_sigaction = on_tick, .sa_flags = SA_SIGINFO | SA_RESTART };
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 1, .sigev_value.sival_int = 4711 };
	struct itimerspec often = { { 0, 20 * 1000 * 1000 }, { 0, 20 * 1000 * 1000 } }, seldom = { { 11, 0 }, { 3600, 0 } };
	void *(*bodies[])(void *) = { in_condition, in_sleep, in_read, in_poll, with_pending };
	pthread_t thread;
	sigset_t asked;
	int number;

	folder = arguments[1];
	sigemptyset(&asked);
	sigaddset(&asked, SIGUSR1);
	sigaddset(&asked, SIGRTMIN + 3);
	pthread_sigmask(SIG_BLOCK, &asked, NULL);
	if (count < 2 || pipe(pipes))
		return 1;
	for (size_t i = 0; i < sizeof(bodies) / sizeof(*bodies); i++)
		pthread_create(&thread, NULL, bodies[i], NULL);
	sigaltstack(&alternate, NULL);
	sigaction(SIGUSR2, &on_stack, NULL);
	sigaction(SIGRTMIN + 1, &tick, NULL);
	timer_create(CLOCK_MONOTONIC, &event, &periodic);
	timer_settime(periodic, 0, &often, NULL);
	event.sigev_notify = SIGEV_NONE;
	timer_create(CLOCK_REALTIME, &event, &distant);
	timer_settime(distant, 0, &seldom, NULL);
	for (int i = 1; i <= 3; i++) {
		union sigval value = { .sival_int = i };

		sigqueue(getpid(), SIGRTMIN + 3, value);
	}
	sigdelset(&asked, SIGRTMIN + 3);
	reached(&wakeups[1], 1);
	reached(&wakeups[4], 1); /* its signal is pending, or the state would change after ready */
	publish(".ready", "ready", "%d", getpid());
	for (int reports = 1;; reports++) {
		char name[64];

		while (sigwait(&asked, &number) || number != SIGUSR1)
			;
		failures[0] = 0;
		check();
		snprintf(name, sizeof(name), "report-%d.json", reports);
		publish(".report", name, "{\"ok\": %s, \"failures\": [%s], \"number\": %d}", failures[0] ? "false" : "true", failures, reports);
	}
}
