/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl_old: an NCCL that is too old (tests/unit/comm/test_comm_nccl.py). */
int ncclGetUniqueId(void *id);
int ncclGetUniqueId(void *id) { return id ? 0 : 4; }
