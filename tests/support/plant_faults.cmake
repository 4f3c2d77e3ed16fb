# Faults that tests must find. A proof that has never failed may be one that can't.
#
# hicache_plant_faults(OUT SOURCE  NAME RIGHT WRONG  [NAME RIGHT WRONG ...])
#
# OUT becomes the path of a copy of SOURCE in which the text RIGHT, which must be there exactly once, is done only
# while the fault NAME is asleep, and WRONG in its place while it is awake (tests/support/planted_fault.hpp). A program
# that is built with the copy takes it in the place of the same source of a library.
function(hicache_plant_faults out source)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${source})
  file(READ ${CMAKE_SOURCE_DIR}/${source} text)
  set(at 2)
  while(at LESS ARGC)
    math(EXPR right "${at} + 1")
    math(EXPR wrong "${at} + 2")
    set(name "${ARGV${at}}")
    string(FIND "${text}" "${ARGV${right}}" first)
    string(FIND "${text}" "${ARGV${right}}" last REVERSE)
    if(first EQUAL -1 OR NOT first EQUAL last)
      message(FATAL_ERROR "fault '${name}': '${ARGV${right}}' is not exactly once in ${source}; "
        "say in ${CMAKE_CURRENT_LIST_FILE} what takes its place")
    endif()
    string(REPLACE "${ARGV${right}}"
      "if (::hicache::test::planted_fault(\"${name}\")) { ${ARGV${wrong}} } else { ${ARGV${right}} }" text "${text}")
    math(EXPR at "${at} + 3")
  endwhile()
  string(PREPEND text "#include \"tests/support/planted_fault.hpp\"\n")
  string(MAKE_C_IDENTIFIER ${source} copy)
  set(copy ${CMAKE_CURRENT_BINARY_DIR}/planted/${copy}.cpp)
  set(old "")
  if(EXISTS ${copy})
    file(READ ${copy} old)
  endif()
  if(NOT old STREQUAL text)
    file(WRITE ${copy} "${text}")
  endif()
  set(${out} ${copy} PARENT_SCOPE)
endfunction()
