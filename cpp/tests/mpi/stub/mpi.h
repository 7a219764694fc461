// The part of MPI's interface that mpi_bootstrap.hpp and its test use, for the compiler alone: machines without MPI check the header
// too. Types are classes of their own, so that none stands in for another.
#pragma once

#include <cstddef>

struct StubComm;
struct StubErrorHandler;
struct StubDatatype;
using MPI_Comm = StubComm*;
using MPI_Errhandler = StubErrorHandler*;
using MPI_Datatype = StubDatatype*;

extern MPI_Comm const MPI_COMM_WORLD;
constexpr MPI_Comm MPI_COMM_NULL = nullptr;
extern MPI_Errhandler const MPI_ERRORS_RETURN;
extern MPI_Datatype const MPI_UINT64_T;
extern MPI_Datatype const MPI_BYTE;
constexpr int MPI_SUCCESS = 0;
constexpr std::size_t MPI_MAX_ERROR_STRING = 256;

int MPI_Init(int*, char***);
int MPI_Finalize();
int MPI_Abort(MPI_Comm, int);
int MPI_Initialized(int*);
int MPI_Finalized(int*);
int MPI_Comm_dup(MPI_Comm, MPI_Comm*);
int MPI_Comm_test_inter(MPI_Comm, int*);
int MPI_Comm_split(MPI_Comm, int, int, MPI_Comm*);
int MPI_Intercomm_create(MPI_Comm, int, MPI_Comm, int, int, MPI_Comm*);
int MPI_Comm_free(MPI_Comm*);
int MPI_Comm_rank(MPI_Comm, int*);
int MPI_Comm_size(MPI_Comm, int*);
int MPI_Comm_set_errhandler(MPI_Comm, MPI_Errhandler);
int MPI_Error_string(int, char*, int*);
int MPI_Allgather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm);
int MPI_Allgatherv(const void*, int, MPI_Datatype, void*, const int*, const int*, MPI_Datatype, MPI_Comm);
