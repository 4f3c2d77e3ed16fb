// Catch2, version 2 (Debian 12) or 3 (elsewhere).
#pragma once
#if defined(HICACHE_CATCH2_V3)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
