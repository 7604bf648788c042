/* SPDX-License-Identifier: Apache-2.0
 *
 * log: lines on standard error, or wherever the program sends them. Process-wide, any thread. Results of a command are
 * not log lines. The layers below the programs log at debug level. They warn of what no caller would see otherwise,
 * such as damage met while serving a read, an abort that could not be written, or a storage that fails and is asked
 * again. */
#ifndef CORE_BASE_LOG_H
#define CORE_BASE_LOG_H

enum base_log_level { BASE_LOG_ERROR, BASE_LOG_WARNING, BASE_LOG_INFO, BASE_LOG_DEBUG };

void base_log(enum base_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
void base_log_set_level(enum base_log_level most);   /* default BASE_LOG_WARNING */
void base_log_set_program(const char *name);         /* prefix of each line; the string must live on */
/* The default sink, for a sink that also wants what it does. */
void base_log_to_stderr(enum base_log_level level, const char *text);
/* Replaces the sink (default: "PROGRAM: text\n" on standard error in one write). NULL restores it. */
void base_log_set_sink(void (*sink)(enum base_log_level level, const char *text));

#define base_error_log(...) base_log(BASE_LOG_ERROR, __VA_ARGS__)
#define base_warning(...) base_log(BASE_LOG_WARNING, __VA_ARGS__)
#define base_info(...) base_log(BASE_LOG_INFO, __VA_ARGS__)
#define base_debug(...) base_log(BASE_LOG_DEBUG, __VA_ARGS__)

#endif
