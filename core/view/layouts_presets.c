/* SPDX-License-Identifier: Apache-2.0
 *
 * Presets: layout files for the names that models have in Hugging Face's repositories and in their authors' own. `tp`
 * is tensor parallelism, `ep` is expert parallelism of experts that are one tensor. Tensors that no line names are
 * replicated. */
#include <string.h>

#include "core/view/layouts.h"

#define ATTENTION \
	"*.[qkv]_proj.*                  tp=S(0)\n" \
	"*.o_proj.*                      tp=S(1)\n"
#define MLP \
	"*.gate_up_proj.*                tp=IS(0,2)\n" \
	"*.gate_proj.*                   tp=S(0)\n" \
	"*.up_proj.*                     tp=S(0)\n" \
	"*.down_proj.*                   tp=S(1)\n"
#define VOCABULARY \
	"*embed_tokens.weight*           tp=S(0)\n" \
	"*lm_head.weight*                tp=S(0)\n"

static const struct { const char *name, *text; } presets[] = {
	{"llama",
		"# Llama, Mistral, Qwen; then Meta's own names\n"
		ATTENTION MLP VOCABULARY
		"*.attention.w[qkv].weight*      tp=S(0)\n"
		"*.attention.wo.weight*          tp=S(1)\n"
		"*.feed_forward.w[13].weight*    tp=S(0)\n"
		"*.feed_forward.w2.weight*       tp=S(1)\n"
		"*tok_embeddings.weight*         tp=S(0)\n"
		"output.weight                   tp=S(0)\n"},
	{"mixtral",
		"# experts: each a tensor of its own, or all in one with the expert first\n"
		"*.experts.gate_up_proj*         ep=S(0)\n"
		"*.experts.down_proj*            ep=S(0)\n"
		"*.experts.*.w[13].weight*       tp=S(0)\n"
		"*.experts.*.w2.weight*          tp=S(1)\n"
		ATTENTION VOCABULARY},
	{"deepseek",
		"# DeepSeek V2 and V3 with latent attention; then the authors' own names\n"
		"*.q_b_proj.*                    tp=S(0)\n"
		"*.kv_b_proj.*                   tp=S(0)\n"
		"*.q_a_proj.*                    R\n"
		"*.kv_a_proj_with_mqa.*          R\n"
		"*.q_proj.*                      tp=S(0)\n"
		"*.o_proj.*                      tp=S(1)\n"
		MLP VOCABULARY
		"*.attn.w[qk]*_b.*               tp=S(0)\n"
		"*.attn.wq.*                     tp=S(0)\n"
		"*.attn.wo.*                     tp=S(1)\n"
		"*.ffn.*w[13].*                  tp=S(0)\n"
		"*.ffn.*w2.*                     tp=S(1)\n"
		"embed.weight                    tp=S(0)\n"
		"head.weight                     tp=S(0)\n"},
};

const char *view_layouts_preset(const char *name)
{
	for (size_t i = 0; i < BASE_COUNT(presets); i++)
		if (strcmp(name, presets[i].name) == 0)
			return presets[i].text;
	return NULL;
}
