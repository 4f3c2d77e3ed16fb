/* Marks what libhicache.so shows to its users; everything else stays inside the library. C and C++. */
#ifndef HICACHE_EXPORT_H
#define HICACHE_EXPORT_H

#if defined(__GNUC__)
#define HICACHE_EXPORT __attribute__((visibility("default")))
#define HICACHE_LOCAL __attribute__((visibility("hidden")))
#else
#define HICACHE_EXPORT
#define HICACHE_LOCAL
#endif

#endif /* HICACHE_EXPORT_H */
