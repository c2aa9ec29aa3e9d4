/* Counts in a file that it has mapped, shared, and closed: `sharedmap PATH`.  Says CORRUPT when anybody else has counted there. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int file = argc > 1 ? open(argv[1], O_RDWR | O_CREAT, 0600) : -1;
    if (file < 0 || ftruncate(file, 4096))
        return 1;
    volatile long *shared = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED)
        return 2;
    close(file);
    long expected = shared[0] = 0;
    for (;;) {
        if (shared[0] != expected)
            puts("CORRUPT");
        shared[0] = ++expected;
        printf("%ld\n", expected);
        fflush(stdout);
        usleep(20000);
    }
}
