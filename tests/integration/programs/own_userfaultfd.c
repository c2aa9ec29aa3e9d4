/* Registers a userfaultfd of its own on its memory, again and again: what the calls return is in
 * "answers", a line for each time. The memory is 80 MiB. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int main(void) {
    const size_t size = 80 << 20;
    char *memory = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(memory, 7, size);
    for (;;) {
        int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
        struct uffdio_api api = {.api = UFFD_API};
        struct uffdio_register range = {
            .range = {(unsigned long)memory, size}, .mode = UFFDIO_REGISTER_MODE_MISSING};
        ioctl(fd, UFFDIO_API, &api);
        int answer = ioctl(fd, UFFDIO_REGISTER, &range) ? errno : 0;
        close(fd);
        FILE *file = fopen("answers", "a");
        fprintf(file, "%d\n", answer);
        fclose(file);
        struct timespec pause = {0, 20000000};
        nanosleep(&pause, 0);
    }
}
