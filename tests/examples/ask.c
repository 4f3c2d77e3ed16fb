/* The C example of README.md as a program: see attach.cpp. */
/* README begin */
#include <stdio.h>
#include <string.h>

#include "hicache/hicache.h"

/* Waits for an operation that was posted with `status`; 0 when it ended well. */
static int finish(hicache_session* session, hicache_status status, hicache_ticket ticket,
                  hicache_result* result) {
  memset(result, 0, sizeof *result);
  result->struct_size = sizeof *result;
  if (status == HICACHE_OK) status = hicache_wait(session, ticket, 5000, result);
  if (status != HICACHE_OK) return fprintf(stderr, "%s\n", hicache_last_error()), 1;
  return result->status == HICACHE_OK ? 0 : 1;
}

/* Asks what of a prompt is cached and gives the lease back. That much needs no device buffers. */
int ask(const char* socket_path, const uint32_t* tokens, size_t token_count) {
  hicache_namespace spec = {.struct_size = sizeof spec,
                            .attention = HICACHE_ATTENTION_MHA,
                            .model = "example/model",
                            .dtype = "bfloat16",
                            .page_tokens = 16,
                            .layers = 2,
                            .heads_per_shard = 8,
                            .head_dim = 64,
                            .element_bytes = 2,
                            .tp_size = 1};
  hicache_attach_options options = {.struct_size = sizeof options,
                                    .role = HICACHE_ROLE_RANK,
                                    .socket_path = socket_path,
                                    .engine = "asker",
                                    .spec = &spec};
  hicache_session* session = NULL;
  if (hicache_attach(&options, &session) != HICACHE_OK)
    return fprintf(stderr, "%s\n", hicache_last_error()), 1;

  hicache_hash hashes[64];
  size_t pages = token_count / spec.page_tokens;
  if (pages > 64) pages = 64;
  hicache_hash_chain(tokens, pages * spec.page_tokens, spec.page_tokens, NULL, hashes);

  hicache_ticket ticket = 0;
  hicache_result result;
  hicache_status status = hicache_reserve(session, 1, hashes, pages, 0, &ticket);
  int failed = finish(session, status, ticket, &result);
  if (!failed) {
    printf("%u of %zu pages cached\n", result.hits, pages);
    status = hicache_release(session, result.lease, 0, &ticket);
    failed = finish(session, status, ticket, &result);
  }
  hicache_session_destroy(session);
  return failed;
}

int main(int argc, char** argv) {
  uint32_t tokens[64];
  for (uint32_t i = 0; i < 64; ++i) tokens[i] = 1000 + i;
  if (argc != 2) {
    fprintf(stderr, "usage: %s SOCKET\n", argv[0]);
    return 2;
  }
  return ask(argv[1], tokens, 64);
}
/* README end */
