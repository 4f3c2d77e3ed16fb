# hicache_test(NAME name LABEL label SOURCES ... LIBRARIES ...): a Catch2 program (version 2 or 3) of one kind of test.
function(hicache_test)
  cmake_parse_arguments(T "" "NAME;LABEL" "SOURCES;LIBRARIES" ${ARGN})
  add_executable(${T_NAME} ${T_SOURCES})
  target_link_libraries(${T_NAME} PRIVATE hicache_test_support ${T_LIBRARIES})
  add_test(NAME ${T_NAME} COMMAND ${T_NAME} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(${T_NAME} PROPERTIES LABELS ${T_LABEL} TIMEOUT 600
    ENVIRONMENT "HICACHE_BIN=${CMAKE_BINARY_DIR}/bin;HICACHE_LIB=${CMAKE_BINARY_DIR}/lib")
endfunction()
