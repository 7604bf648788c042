/* SPDX-License-Identifier: Apache-2.0
 *
 * error: sentences for people. Texts often hold names that come from files: what a terminal might obey becomes '?'
 * (text.h), so that a sentence stays one line there and in a log. A cut at the end never splits a UTF-8 character. */
#include "core/base/error.h"
#include "core/base/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define BASE_UPDATE "; update vckpt"     /* what to do about all that a newer one wrote */

/* Cuts off a UTF-8 sequence that the end of the array interrupted. */
static void error_trim(char *text, size_t len)
{
	size_t start = len;

	while (start > 0 && len - start < 4 && ((unsigned char)text[start - 1] & 0xc0) == 0x80)
		start--;
	if (start > 0 && (unsigned char)text[start - 1] >= 0xc0)
		text[start - 1] = 0;
}

static void error_store(struct base_error *err, int code, const char *text, bool cut)
{
	memcpy(err->text, text, strlen(text) + 1);
	if (cut)
		error_trim(err->text, strlen(err->text));
	base_text_clean(err->text);
	err->code = code;
}

static int error_setv(struct base_error *err, int code, const char *format, va_list args)
{
	char text[sizeof err->text]; /* arguments may point into err->text */
	int n;

	if (!err)
		return code;
	n = vsnprintf(text, sizeof text, format, args);
	if (n < 0)
		snprintf(text, sizeof text, "%s", base_error_name(code));
	error_store(err, code, text, n >= (int)sizeof text);
	return code;
}

int base_error_set(struct base_error *err, int code, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	error_setv(err, code, format, args);
	va_end(args);
	return code;
}

static void error_format(char *text, size_t room, const char *format, va_list args)
{
	if (vsnprintf(text, room, format, args) < 0)
		text[0] = 0;
}

int base_error_newer(struct base_error *err, const char *format, ...)
{
	char text[sizeof err->text];
	va_list args;

	va_start(args, format);
	error_format(text, sizeof text, format, args);
	va_end(args);
	return base_error_set(err, -BASE_EVERSION, "%s" BASE_UPDATE, text);
}

int base_no_memory(struct base_error *err)
{
	return base_error_set(err, -ENOMEM, "out of memory");
}

int base_no_memory_for(struct base_error *err, const char *what, ...)
{
	char text[sizeof err->text];
	va_list args;

	va_start(args, what);
	error_format(text, sizeof text, what, args);
	va_end(args);
	return base_error_set(err, -ENOMEM, "%s: out of memory", text);
}

int base_error_prefix(struct base_error *err, int code, const char *format, ...)
{
	char text[sizeof err->text];
	const char *rest;
	size_t len, room;
	va_list args;

	if (!err)
		return code;
	if (err->code)
		code = err->code;
	rest = err->code ? err->text : base_error_name(code);
	va_start(args, format);
	error_format(text, sizeof text, format, args);
	va_end(args);
	len = strlen(text);
	room = sizeof text - len;
	error_store(err, code, text, (size_t)snprintf(text + len, room, ": %s", rest) >= room);
	return code;
}

const char *base_error_name(int code)
{
	const char *text;

	switch (-code) {
	case BASE_EDAMAGED: return "stored bytes are damaged";
	case BASE_EFORMAT: return "format rules are broken";
	case BASE_EVERSION: return "written by a newer vckpt: its version, or a feature, is not known here" BASE_UPDATE;
	case BASE_ENOSTORE: return "not a vckpt store";
	case BASE_EABORTED: return "the attempt was aborted";
	case BASE_EUNDECIDED: return "undecided: the step may still become visible";
	case BASE_EFORKED: return "it belongs to the process that this one was forked from";
	case BASE_EBUSY: return "it is in use";
	case BASE_EPINNED: return "the step has to stay as it is";
	case BASE_ELIMIT: return "a size maximum of the format is exceeded";
	}
	text = strerrordesc_np(-code);
	return text ? text : "unknown error";
}
