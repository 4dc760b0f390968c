// Shifts the wall clock of a process by the number of nanoseconds in the file $SHIFT_FILE, a native 64-bit integer
// that a test may change at any time. Monotonic clocks are unchanged.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void open_shift(void) {
  real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  const char *path = getenv("SHIFT_FILE");
  int file = path ? open(path, O_RDONLY) : -1;
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
  if (mapped != MAP_FAILED) shift = mapped;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *result) {
  if (!real_clock_gettime) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  int status = real_clock_gettime(clock, result);
  if (status == 0 && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    int64_t total = (int64_t)result->tv_sec * 1000000000 + result->tv_nsec + *shift;
    result->tv_sec = total / 1000000000;
    result->tv_nsec = total % 1000000000;
  }
  return status;
}

int gettimeofday(struct timeval *restrict result, void *restrict zone) {
  (void)zone;
  struct timespec now;
  int status = clock_gettime(CLOCK_REALTIME, &now);
  result->tv_sec = now.tv_sec;
  result->tv_usec = now.tv_nsec / 1000;
  return status;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
