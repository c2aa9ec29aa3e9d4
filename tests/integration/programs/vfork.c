/* A parent that sleeps in vfork (state D) while its child lives on. */
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	puts("ready");
	fflush(stdout);
	if (vfork() == 0) {
		pause();
		_exit(0);
	}
	return 0;
}
