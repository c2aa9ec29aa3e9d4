/* Two processes hand a semaphore with a name to and fro: `semaphores NAME`.  Says how often, or LOST when one waits in vain. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdio.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static sem_t *named(const char *name, const char *end) {
    char full[200];
    snprintf(full, sizeof full, "%s-%s", name, end);
    return sem_open(full, O_CREAT, 0600, 0);
}

int main(int argc, char **argv) {
    sem_t *there = argc > 1 ? named(argv[1], "there") : SEM_FAILED;
    sem_t *back = argc > 1 ? named(argv[1], "back") : SEM_FAILED;
    if (there == SEM_FAILED || back == SEM_FAILED)
        return 1;
    pid_t child = fork();
    if (child < 0)
        return 2;
    for (long count = 1;; count++) {
        if (child == 0) {
            while (sem_wait(there) && errno == EINTR)
                ;
            sem_post(back);
            continue;
        }
        sem_post(there);
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec += 60;
        while (sem_clockwait(back, CLOCK_MONOTONIC, &until)) {
            if (errno != EINTR) {
                puts("LOST");
                return 3;
            }
        }
        printf("%ld\n", count);
        fflush(stdout);
        usleep(20000);
    }
}
