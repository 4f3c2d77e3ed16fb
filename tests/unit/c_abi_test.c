/* The C interface as another language sees it: hicache.h compiled as C, libhicache.so opened with dlopen. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "hicache/hicache.h"
#include "hicache/hicache_controller.h"

static int failures = 0;

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                     \
    }                                                                 \
  } while (0)

#define FIND(name)                                                       \
  __typeof__(&name) p_##name = (__typeof__(&name))dlsym(library, #name); \
  CHECK(p_##name != NULL)

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: c_abi_test LIBHICACHE.SO VERSION\n");
    return 2;
  }
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  FIND(hicache_version);
  FIND(hicache_abi_version);
  FIND(hicache_status_name);
  FIND(hicache_last_error);
  FIND(hicache_attach);
  FIND(hicache_close);
  FIND(hicache_session_destroy);
  FIND(hicache_state);
  FIND(hicache_session_get_info);
  FIND(hicache_buffer_create);
  FIND(hicache_buffer_data);
  FIND(hicache_buffer_size);
  FIND(hicache_buffer_fd);
  FIND(hicache_buffer_destroy);
  FIND(hicache_register_buffers);
  FIND(hicache_probe);
  FIND(hicache_nop);
  FIND(hicache_reserve);
  FIND(hicache_write);
  FIND(hicache_load);
  FIND(hicache_release);
  FIND(hicache_poll);
  FIND(hicache_wait);
  FIND(hicache_wait_any);
  FIND(hicache_raise_write_fence);
  FIND(hicache_layer_ready);
  FIND(hicache_wait_layer);
  FIND(hicache_control);
  FIND(hicache_default_socket_path);
  FIND(hicache_namespace_digest);
  FIND(hicache_namespace_seed);
  FIND(hicache_hash_chain);
  FIND(hicache_controller_create);
  FIND(hicache_controller_destroy);
  FIND(hicache_controller_alloc);
  FIND(hicache_controller_free);
  FIND(hicache_controller_match);
  FIND(hicache_controller_adopt);
  FIND(hicache_controller_insert);
  FIND(hicache_controller_load_back);
  FIND(hicache_controller_lock);
  FIND(hicache_controller_unlock);
  FIND(hicache_controller_evict);
  FIND(hicache_controller_evict_host);
  FIND(hicache_controller_pin);
  FIND(hicache_controller_expire_pins);
  FIND(hicache_controller_set_start_fence);
  FIND(hicache_controller_start_loading);
  FIND(hicache_controller_wait_layer);
  FIND(hicache_controller_check_events);
  FIND(hicache_controller_reset);
  if (failures > 0) return 1;

  CHECK(strcmp(p_hicache_version(), argv[2]) == 0);
  CHECK(p_hicache_abi_version() == HICACHE_ABI_VERSION);
  CHECK(strcmp(p_hicache_status_name(HICACHE_OK), "ok") == 0);
  CHECK(strcmp(p_hicache_status_name(HICACHE_INTERNAL), "internal") == 0);
  CHECK(strcmp(p_hicache_status_name(-1), "unknown_status") == 0);
  CHECK(strcmp(p_hicache_status_name(HICACHE_INTERNAL + 1), "unknown_status") == 0);
  CHECK(p_hicache_last_error()[0] == '\0');
  /* Nothing but the interface shows. */
  CHECK(dlsym(library, "_ZN7hicache7Session4ImplD1Ev") == NULL);

  hicache_namespace spec;
  memset(&spec, 0, sizeof spec);
  spec.struct_size = sizeof spec;
  spec.attention = HICACHE_ATTENTION_MHA;
  spec.model = "model";
  spec.dtype = "bfloat16";
  spec.page_tokens = 4;
  spec.layers = 2;
  spec.heads_per_shard = 1;
  spec.head_dim = 16;
  spec.element_bytes = 2;
  spec.tp_size = 1;

  /* An absent daemon is an error with a text, at once. */
  hicache_attach_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.role = HICACHE_ROLE_RANK;
  options.socket_path = "/nonexistent/hicache.sock";
  options.engine = "engine";
  options.spec = &spec;
  hicache_session* session = (hicache_session*)&options;
  const double start = seconds();
  CHECK(p_hicache_attach(&options, &session) == HICACHE_DAEMON_ABSENT);
  CHECK(seconds() - start < 5.0);
  CHECK(session == NULL);
  CHECK(strstr(p_hicache_last_error(), "/nonexistent/hicache.sock") != NULL);

  /* Bad arguments are refused, with the name of what is wrong. */
  CHECK(p_hicache_attach(NULL, &session) == HICACHE_INVALID_ARGUMENT);
  CHECK(p_hicache_attach(&options, NULL) == HICACHE_INVALID_ARGUMENT);
  options.struct_size = 8;
  CHECK(p_hicache_attach(&options, &session) == HICACHE_INVALID_ARGUMENT);
  CHECK(strstr(p_hicache_last_error(), "struct_size") != NULL);
  options.struct_size = sizeof options;
  options.role = 3;
  CHECK(p_hicache_attach(&options, &session) == HICACHE_INVALID_ARGUMENT);
  CHECK(strstr(p_hicache_last_error(), "role") != NULL);
  options.role = HICACHE_ROLE_RANK;
  options.tp_rank = 1;
  CHECK(p_hicache_attach(&options, &session) == HICACHE_INVALID_ARGUMENT);
  CHECK(strstr(p_hicache_last_error(), "tp_rank") != NULL);
  options.spec = NULL;
  CHECK(p_hicache_attach(&options, &session) == HICACHE_INVALID_ARGUMENT);
  uint32_t leading = 0;
  hicache_ticket ticket = 0;
  hicache_result result;
  memset(&result, 0, sizeof result);
  CHECK(p_hicache_probe(NULL, NULL, 0, &leading, NULL) == HICACHE_INVALID_ARGUMENT);
  CHECK(p_hicache_nop(NULL, 0, &ticket) == HICACHE_INVALID_ARGUMENT);
  CHECK(p_hicache_poll(NULL, &result) == HICACHE_INVALID_ARGUMENT);
  CHECK(p_hicache_state(NULL) == HICACHE_INVALID_ARGUMENT);
  CHECK(p_hicache_layer_ready(NULL, 0, 1, 0) == 0);
  p_hicache_session_destroy(NULL);
  p_hicache_buffer_destroy(NULL);

  /* A caller of a later version: fields that this library does not know must be zero. */
  struct {
    hicache_namespace known;
    uint64_t later;
  } grown;
  memset(&grown, 0, sizeof grown);
  grown.known = spec;
  grown.known.struct_size = sizeof grown;
  hicache_hash digest;
  hicache_hash same;
  CHECK(p_hicache_namespace_digest(&spec, &digest) == HICACHE_OK);
  CHECK(p_hicache_namespace_digest(&grown.known, &same) == HICACHE_OK);
  CHECK(memcmp(&digest, &same, sizeof digest) == 0);
  grown.later = 1;
  CHECK(p_hicache_namespace_digest(&grown.known, &same) == HICACHE_INVALID_ARGUMENT);
  spec.revision = "other";
  CHECK(p_hicache_namespace_digest(&spec, &same) == HICACHE_OK);
  CHECK(memcmp(&digest, &same, sizeof digest) != 0);
  CHECK(p_hicache_namespace_seed(&spec, &same) == HICACHE_NOT_FOUND);
  spec.cache_salt = "";
  CHECK(p_hicache_namespace_seed(&spec, &same) == HICACHE_OK);

  /* The hash chain: page 1 hangs on page 0. */
  const uint32_t tokens[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  hicache_hash chain[2];
  hicache_hash second;
  CHECK(p_hicache_hash_chain(tokens, 9, 4, NULL, chain) == HICACHE_OK);
  CHECK(p_hicache_hash_chain(tokens + 4, 4, 4, &chain[0], &second) == HICACHE_OK);
  CHECK(memcmp(&second, &chain[1], sizeof second) == 0);
  CHECK(p_hicache_hash_chain(tokens, 9, 0, NULL, chain) == HICACHE_INVALID_ARGUMENT);

  /* Device buffers. */
  hicache_buffer* buffer = NULL;
  CHECK(p_hicache_buffer_create(0, &buffer) == HICACHE_INVALID_ARGUMENT);
  CHECK(p_hicache_buffer_create(10000, &buffer) == HICACHE_OK);
  CHECK(p_hicache_buffer_size(buffer) == 10000);
  CHECK(p_hicache_buffer_fd(buffer) >= 0);
  memset(p_hicache_buffer_data(buffer), 7, 10000);
  p_hicache_buffer_destroy(buffer);

  /* Text that does not fit says how much room it needs. */
  char path[256];
  size_t needed = 0;
  CHECK(p_hicache_default_socket_path("name", path, sizeof path, &needed) == HICACHE_OK);
  CHECK(needed == strlen(path) + 1);
  CHECK(strstr(path, "name.sock") != NULL);
  CHECK(p_hicache_default_socket_path("name", path, 3, &needed) == HICACHE_TOO_LARGE);
  const char* arguments[1] = {"status"};
  CHECK(p_hicache_control("/nonexistent/hicache.sock", arguments, 1, 1000, path, sizeof path, NULL) ==
        HICACHE_DAEMON_ABSENT);

  if (failures == 0) printf("every check passed\n");
  return failures == 0 ? 0 : 1;
}
