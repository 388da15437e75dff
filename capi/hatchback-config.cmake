# find_package(hatchback) gives the target hatchback::hatchback: the header and the shared library.
get_filename_component(_hatchback_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
find_path(HATCHBACK_INCLUDE_DIR hatchback.h HINTS "${_hatchback_prefix}/include" "${_hatchback_prefix}/../include")
find_library(HATCHBACK_LIBRARY hatchback HINTS "${_hatchback_prefix}/lib" "${CMAKE_CURRENT_LIST_DIR}/../..")
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(hatchback DEFAULT_MSG HATCHBACK_LIBRARY HATCHBACK_INCLUDE_DIR)

if(hatchback_FOUND AND NOT TARGET hatchback::hatchback)
  add_library(hatchback::hatchback SHARED IMPORTED)
  set_target_properties(hatchback::hatchback PROPERTIES
    IMPORTED_LOCATION "${HATCHBACK_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${HATCHBACK_INCLUDE_DIR}")
endif()
