#!/bin/sh
# From a teacher to a hybrid that is fitted, fine-tuned on the teacher's answers, and tuned by preferences.
#
#     sh recipes/pipeline.sh TEACHER PROMPTS PAIRS FOLDER [REPOSITORY]
#
# PROMPTS and PAIRS are data sets or files of prompts and of preference pairs, as docs/guide/training.md describes them.
# Each stage leaves a folder in FOLDER, and is not run again while that is there. With REPOSITORY, such as me/hybrid, the
# last one is uploaded to the Hub. The options suit a CPU; recipes/configs has those of the papers. PYTHON is the
# interpreter, and OPTIONS are more options for both kinds of training.
set -eu
teacher=$1 prompts=$2 pairs=$3 folder=$4
python=${PYTHON:-python}
train="--teacher_model_name_or_path $teacher --use_cpu true --bf16 false --report_to none ${OPTIONS:-}"

test -e "$folder/hybrid" || $python -m convert.cli "$teacher" "$folder/hybrid"
test -e "$folder/answers" || $python -m recipes.seqkd --teacher_model_name_or_path "$teacher" \
    --dataset_name "$prompts" --output_dir "$folder/answers" --test_share 0.2
test -e "$folder/sft" || $python -m recipes.sft --model_name_or_path "$folder/hybrid" \
    --dataset_name "$folder/answers" --output_dir "$folder/sft" --learning_rate 2e-5 --trainable beyond-window $train
test -e "$folder/dpo" || $python -m recipes.dpo --model_name_or_path "$folder/sft" \
    --dataset_name "$pairs" --output_dir "$folder/dpo" --learning_rate 2e-5 --precompute_ref_log_probs true $train
test $# -lt 5 || hf upload "$5" "$folder/dpo"
