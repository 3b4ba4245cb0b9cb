"""The worth of tests: each guard is taken out, and its test must fail.

    python benchmarks/breaks.py                 # every guard
    python benchmarks/breaks.py --point 1 7     # those of some points
    python benchmarks/breaks.py --guard 3 12    # by their numbers, which are printed

Points: 1 locks, 2 a model's own code, 3 incomplete models, 4 bad content under right checksums, 5
training on numbers that are none, 6 hangs and bombs, 7 packed corpora and stored studies, 8 alarms,
9 numerics, 10 threads, 11 the command line, 12 what else the issue of the door delivers. The tree
is copied and every named test must pass on the copy as it is (one run of all of them); then one
line of the copy is changed, and the named test runs on it in a process of its own. What it says is
printed, so that one sees that it fails for its guard. A test that hangs has noticed nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).parents[1]
FILES, PRETRAINED = "src/nestling/files.py", "src/nestling/adaptation/pretrained.py"
LEARNER, CLI = "src/nestling/adaptation/learner.py", "src/nestling/cli/__init__.py"
STORE, PACKED = "studies/harness/store.py", "src/nestling/train/packed.py"
M, F = "tests/cli/test_strange_models.py::", "tests/test_strange_files.py::"
L, A = "tests/train/test_loop.py::", "tests/adaptation/test_learner.py::"
T, K = "tests/adaptation/test_texts.py::", "tests/adaptation/test_memory_files.py::"
C, S = "tests/cli/test_mistakes.py::", "tests/train/test_strange_runs.py::"
TRAINER, RECIPE = "src/nestling/train/trainer.py", "src/nestling/train/recipe.py"
CONFIGURATION, MODEL = (f"src/nestling/models/{name}.py" for name in ("configuration", "modeling"))
LABELS, SHELL, NESTED = (f"src/nestling/optim/{name}.py" for name in ("labels", "shell", "nested"))
CORE, SLOTS = "src/nestling/memories/core.py", "src/nestling/adaptation/slots.py"
U, P = "tests/models/test_stock.py::", "tests/optim/test_stock.py::"
X, Y = "tests/memories/test_torch.py::", "tests/models/test_torch.py::"
Z = "tests/adaptation/test_models.py::"


class Break(NamedTuple):
    """A guard, what stands there without it, and the test that must notice."""

    point: int
    file: str
    guard: str
    broken: str
    test: str


BREAKS = [
    Break(1, FILES, "fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass",
          F + "test_a_lock_names_its_holder_and_ends_with_it"),
    Break(1, FILES, "for file in old - {part.file}:",
          "for file in {p.name for p in folder.glob(name + '-*')} - {part.file}:",
          F + "test_only_what_the_manifest_named_is_removed"),
    Break(1, "src/nestling/cli/learn.py", "with locked(arguments.memory):",
          "with contextlib.nullcontext():",
          "tests/cli/test_learn.py::test_a_memory_in_use_is_not_learned_into"),
    Break(1, TRAINER, "locked(folder) if world.main else", "contextlib.nullcontext() or",
          L + "test_a_second_run_in_the_same_folder_is_refused"),
    Break(1, FILES, "with locked(folder, wait=120.0):", "with contextlib.nullcontext():",
          F + "test_two_writers_lose_nothing"),
    Break(2, PRETRAINED, '{"trust_remote_code": trust_remote_code}', "{}",
          M + "test_a_models_own_code_never_runs_untrusted[tokenizer]"),
    Break(2, PRETRAINED, "from_config(config, trust_remote_code=False)", "from_config(config)",
          M + "test_a_models_own_code_never_runs_untrusted[clip_text_model]"),
    Break(2, PRETRAINED, "from_pretrained(folder, trust_remote_code=False)",
          "from_pretrained(folder)", M + "test_every_loader_says_whether_code_may_run"),
    Break(2, "src/nestling/cli/describe.py",
          "AutoModelForCausalLM.from_config(config, trust_remote_code=False)",
          "AutoModelForCausalLM.from_config(config)",
          M + "test_a_models_own_code_never_runs_untrusted[clip_text_model]"),
    Break(2, "src/nestling/cli/describe.py",
          "local_files_only=not download, trust_remote_code=False", "local_files_only=not download",
          M + "test_a_models_own_code_never_runs_untrusted[model]"),
    Break(2, "src/nestling/train/tokenizer.py", "name, trust_remote_code=False", "name",
          M + "test_a_models_own_code_never_runs_untrusted[tokenizer]"),
    Break(3, PRETRAINED, "        _check_weights(model, info)\n", "        pass\n",
          M + "test_every_missing_weight_is_noticed"),
    Break(3, PRETRAINED, "        check_finite(weight, key)\n", "        pass\n",
          M + "test_weights_of_another_shape_or_not_finite_are_refused"),
    Break(3, PRETRAINED, "model.state_dict().items():  #", "model.named_parameters():  #",
          M + "test_a_buffer_that_is_not_finite_is_refused"),
    Break(3, "src/nestling/cli/eval.py", "if not math.isfinite(result.loss):", "if False:",
          M + "test_eval_never_prints_a_loss_that_is_none"),
    Break(3, "src/nestling/train/parts.py", "return load_start(recipe.model.start, config)",
          "return NestlingForCausalLM.from_pretrained(recipe.model.start, config=config)",
          S + "test_a_model_to_start_from_must_be_whole"),
    Break(4, FILES, "if tensor.is_floating_point():", "if False:",
          F + "test_a_state_is_refused_for_what_it_holds"),
    Break(4, FILES, "facts = [type(model).__name__, shaping]", "facts = [type(model).__name__]",
          F + "test_one_fingerprint_sees_configuration_and_every_weight"),
    Break(4, "src/nestling/adaptation/memory_files.py",
          'expect(facts, _FACTS, f"{folder}: not a memory")', "pass",
          K + "test_facts_of_another_form_are_refused"),
    Break(4, "src/nestling/adaptation/memory_files.py",
          "check_state(state, learner.continuum.init(1), state.batch, str(folder))", "pass",
          K + "test_content_that_no_memory_has_is_refused"),
    Break(4, "src/nestling/adaptation/memory_files.py",
          "if leaf.dtype not in (level.seen.dtype, torch.float32):", "if False:",
          K + "test_content_that_no_memory_has_is_refused[type]"),
    Break(4, "src/nestling/adaptation/memory_files.py",
          "or ids.dtype != torch.int64 or ids.dim() != rows", "",
          T + "test_a_memory_with_texts_that_are_none_is_refused"),
    Break(5, RECIPE, "clip is None or 0 < clip < math.inf", "True",
          L + "test_mistakes_get_one_clear_line"),
    Break(5, RECIPE, "require(0 < rate <= _MOST_RATE,", "require(True,",
          L + "test_mistakes_get_one_clear_line"),
    Break(5, TRAINER, "if self.state.bad:\n            return", "if False:\n            return",
          L + "test_a_poisoned_loss_changes_nothing_and_stops_the_run"),
    Break(5, "src/nestling/train/checkpoint.py",
          'check_finite(rows, f"{saved.path}: {key}")', "pass",
          L + "test_a_checkpoint_with_numbers_that_are_none_is_not_continued"),
    Break(4, TRAINER, "expect(found.facts, _FACTS, found.path)", "pass",
          S + "test_a_crafted_checkpoint_is_refused_in_one_line[no_loss]"),
    Break(4, TRAINER, "AttributeError, ArithmeticError, RuntimeError)", "AttributeError)",
          S + "test_a_crafted_checkpoint_is_refused_in_one_line[moment_of_another_shape]"),
    Break(4, TRAINER, 'expect(found.load("memory"), _STATE, f"{found.path}: memory")',
          'found.load("memory")',
          S + "test_a_crafted_checkpoint_is_refused_in_one_line[other_loss]"),
    Break(4, TRAINER, 'if saved["step"] != found.step:', "if False:",
          S + "test_a_crafted_checkpoint_is_refused_in_one_line[other_step]"),
    Break(4, TRAINER,
          'check_state(exact, self.bare.model.init_states(1), rows, f"{found.path}: carry")',
          "pass",
          S + "test_a_crafted_checkpoint_is_refused_in_one_line[carried_that_is_none]"),
    Break(5, "src/nestling/train/checkpoint.py",
          "if not bool(ends.isfinite().all()):", "if False:",
          S + "test_a_crafted_checkpoint_is_refused_in_one_line[moment_that_is_none]"),
    Break(12, TRAINER, "for group in left:", "for group in []:",
          S + "test_a_run_keeps_the_precision_it_was_begun_with"),
    Break(6, "src/nestling/train/corpus.py", "except (ValueError, RecursionError) as error:",
          "except ValueError as error:", S + "test_lines_nobody_wrote_are_refused"),
    Break(6, "src/nestling/train/corpus.py", "if len(line) > _LINE:", "if False:",
          S + "test_lines_nobody_wrote_are_refused"),
    Break(6, "src/nestling/train/corpus.py",
          "except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:",
          "except ZeroDivisionError as error:",
          S + "test_a_packed_text_that_is_broken_is_named"),
    Break(6, FILES, "if not stat.S_ISREG(facts.st_mode):", "if False:",
          F + "test_only_regular_files_are_opened"),
    Break(6, FILES, "except (ValueError, RecursionError) as error:", "except ValueError as error:",
          F + "test_json_nobody_wrote_is_refused"),
    Break(6, FILES, 'expect(entry, _ENTRY, f"{where}: {name}")', "pass",
          F + "test_a_header_must_fit_its_bytes"),
    Break(6, "src/nestling/adaptation/memory_files.py", "if not 1 <= len(chunks) <= LEVELS:",
          "if False:", K + "test_facts_of_another_form_are_refused"),
    Break(6, PRETRAINED, "if isinstance(levels, list) and len(levels) > LEVELS:", "if False:",
          M + "test_a_configuration_cannot_ask_for_more_than_the_folder_holds"),
    Break(6, FILES, "if place != self.size:", "if False:",
          F + "test_a_header_must_fit_its_bytes"),
    Break(6, PRETRAINED, "if size != _HEADER.size + 4 * count:", "if False:",
          M + "test_a_llama2c_header_is_measured_before_a_model_is_built"),
    Break(6, FILES, "if limit is not None and facts.st_size > limit:", "if False:",
          F + "test_a_file_larger_than_its_kind_is_not_read"),
    Break(6, "src/nestling/cli/describe.py", "check_config(Path(name))", "pass",
          M + "test_describe_builds_nothing_that_is_not_sensible"),
    Break(6, PRETRAINED, "for keys, most in _MOST.items():", "for keys, most in {}.items():",
          M + "test_a_configuration_cannot_ask_for_more_than_the_folder_holds"),
    Break(6, PRETRAINED, "if not 1 <= tensors <= _ENTRIES or settings > _ENTRIES:", "if False:",
          M + "test_a_gguf_header_is_walked_through_first"),
    Break(4, "src/nestling/cli/tune.py",
          "expect(read_json(path)[0], {axis.key: str for axis in space}, path)",
          "read_json(path)[0]", "tests/cli/test_tune.py::test_a_trial_of_another_form_is_named"),
    Break(6, FILES, "JSON_LIMIT if plain else None", "None",
          M + "test_settings_larger_than_any_are_not_read[vocab.txt]"),
    Break(6, "src/nestling/train/tokenizer.py", "except Exception as error:",
          "except (OSError, ValueError) as error:",
          M + "test_the_folder_of_a_tokenizer_is_measured_first[other]"),
    Break(6, PRETRAINED, "open_regular(beside, TOKENIZER_BYTES).close()", "pass",
          M + "test_what_lies_beside_a_gguf_is_measured_too"),
    Break(6, PRETRAINED, "_check_fields(config.to_dict(), path.name)", "pass",
          M + "test_a_gguf_cannot_ask_for_more_than_it_holds[context]"),
    Break(6, PRETRAINED, "_check_size(config, path.stat().st_size)", "pass",
          M + "test_a_gguf_cannot_ask_for_more_than_it_holds[small]"),
    Break(7, PACKED, "made._verify(manifest.parts)", "pass",
          "tests/train/test_data.py::test_a_packed_corpus_is_verified_and_leaves_nothing_behind"),
    Break(7, PACKED, "if numbers is self.tokens and largest >= self.vocab_size:", "if False:",
          "tests/train/test_data.py::test_a_packed_corpus_is_verified_and_leaves_nothing_behind"),
    Break(7, PACKED, "        _sweep(cache)\n", "",
          "tests/train/test_data.py::test_a_packed_corpus_is_verified_and_leaves_nothing_behind"),
    Break(7, PACKED,
          'expect(manifest.meta, _FACTS, f"{folder}: not a packed corpus")', "manifest.meta",
          "tests/train/test_data.py::test_a_packed_corpus_is_verified_and_leaves_nothing_behind"),
    Break(7, STORE, "    if not same:", "    if False:",
          "tests/studies/test_store.py::test_every_changed_byte_is_seen"),
    Break(7, STORE, "if self.path(key) != path:", "if False:",
          "tests/studies/test_store.py::test_swapped_files_are_refused"),
    Break(7, STORE, 'part in ("", ".", "..")', 'part in ("",)',
          "tests/studies/test_store.py::test_names_stay_inside_the_folder"),
    Break(7, "studies/harness/models.py", "    if not sealed(folder):\n        return None\n", "",
          "tests/studies/test_harness.py::test_a_model_is_kept_whole_or_not_at_all"),
    Break(8, "src/nestling/continuum/fast.py", "if not _finite(fast):", "if False:",
          A + "test_what_is_not_finite_is_refused"),
    Break(8, LEARNER, "if math.isinf(self.limits.forget):", "if True:",
          T + "test_a_text_that_spoils_what_was_known_is_refused"),
    Break(8, LEARNER, "if self._begun is None and self._known is not None and self._moved",
          "if False", T + "test_a_stream_that_spoils_what_was_known_is_refused"),
    Break(8, LEARNER, "if self._begun is None and self._known is None:",
          "if self._begun is None:",
          T + "test_a_stream_is_judged_by_where_it_began_however_it_is_cut"),
    Break(8, LEARNER, "self._refuse(alarm, report, self._unspoilt(self._known))",
          "self._refuse(alarm, report)",
          T + "test_a_refused_stream_goes_back_to_before_its_harm"),
    Break(8, LEARNER, "self.probes.insert(self.watched, ids)", "pass",
          T + "test_a_text_of_the_users_own_is_watched"),
    Break(8, "src/nestling/adaptation/drift.py",
          "if math.isfinite(step) and step > limits.step * base:", "if False:",
          A + "test_one_update_moves_no_further_than_its_trust_region"),
    Break(8, "src/nestling/adaptation/drift.py",
          "if math.isfinite(far) and far > limits.drift * base:", "if False:",
          A + "test_at_its_drift_limit_a_memory_goes_on_learning"),
    Break(8, "src/nestling/adaptation/drift.py",
          'if name is not None and (not name or name.startswith("@")):', "if False:",
          A + "test_snapshot_names_that_look_unnamed_are_refused"),
    Break(8, "src/nestling/cli/learn.py", "return 0 if learned else 1", "return 0",
          "tests/cli/test_learn.py::test_a_text_that_is_refused_ends_with_1_and_is_named"),
    Break(8, LEARNER, "fasts = text.before if after is None", "fasts = now if after is None",
          T + "test_a_poisoned_text_is_undone_within_five_percent"),
    Break(9, "src/nestling/memories/core.py",
          "return picked.masked_fill(~self.valid.unsqueeze(-1), 0.0)",
          "return picked * self.valid.unsqueeze(-1)",
          "tests/memories/test_torch.py::test_what_stands_at_masked_positions_does_not_matter"),
    Break(9, "src/nestling/continuum/stream.py",
          "return torch.autocast(like.device.type, enabled=False)",
          "import contextlib; return contextlib.nullcontext()",
          A + "test_learning_under_autocast"),
    Break(9, "src/nestling/memories/omega.py", "products(retain[..., now])",
          "(lambda g: g.unsqueeze(-1) / g.unsqueeze(-2))(retain[..., now].cumprod(-1))",
          "tests/memories/test_torch.py::test_omega_forgets_everything_and_goes_on"),
    Break(10, "src/nestling/scan/backends.py", "with _PlainAttention():",
          "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):",
          T + "test_jobs_in_threads_equal_jobs_in_turn"),
    Break(11, CLI, 'raise ValueError(f"{message} (`{self.prog} --help` explains)")',
          "super().error(message)", C + "test_what_argparse_and_what_we_find_is_one_line"),
    Break(11, CLI, "except (ValueError, OSError) as error:", "except OSError as error:",
          C + "test_what_argparse_and_what_we_find_is_one_line"),
    Break(11, "src/nestling/cli/options.py", "if not path.parent.is_dir():", "if False:",
          C + "test_a_timeline_that_cannot_be_written_is_refused_before_learning"),
    Break(11, "src/nestling/cli/generate.py",
          'if any("\\ud800" <= letter <= "\\udfff" for letter in prompt):', "if False:",
          C + "test_a_prompt_that_is_not_utf8_is_named"),
    Break(11, "src/nestling/description/description.py", "table.add_row(*map(Text, row))",
          "table.add_row(*row)", C + "test_level_names_are_not_read_as_markup"),
    Break(11, CLI, "parse_intermixed_args", "parse_args",
          C + "test_options_and_changes_may_stand_in_any_order"),
    Break(11, CLI, "except BrokenPipeError:  #", "except ZeroDivisionError:  #",
          C + "test_a_reader_that_leaves_is_no_error"),
    Break(11, CLI, "except KeyboardInterrupt:", "except ZeroDivisionError:",
          C + "test_an_interrupt_while_a_command_is_imported_is_quiet"),
    Break(11, "src/nestling/cli/tune.py", "    check(recipe)\n", "",
          "tests/cli/test_tune.py::test_mistakes_are_told_before_any_work"),
    Break(11, "src/nestling/cli/tune.py", "check(at_point(recipe, point, _levels(recipe)))",
          "at_point(recipe, point, _levels(recipe))",
          "tests/cli/test_tune.py::test_mistakes_are_told_before_any_work"),
    Break(11, RECIPE, 'if text.count("[") + text.count("{") <= 200 else text', "",
          L + "test_mistakes_get_one_clear_line"),
    Break(11, RECIPE, "none or value >= least", "True",
          L + "test_mistakes_get_one_clear_line"),
    Break(12, FILES, "os.O_RDWR | os.O_CREAT | _OPEN, 0o600", "os.O_RDWR | os.O_CREAT, 0o644",
          F + "test_files_are_their_owners_only"),
    Break(13, CONFIGURATION, 'keys_to_ignore_at_inference = ["past_key_values", "updates"]',
          'keys_to_ignore_at_inference = ("past_key_values", "updates")',
          U + "test_the_trainer_evaluates_predicts_and_loads_its_best"),
    Break(14, CONFIGURATION, "self.auto_map = dict(_AUTO_MAP)", "pass",
          U + "test_a_process_that_never_imported_us_opens_it_with_remote_code"),
    Break(14, "src/nestling/__init__.py", "_registration.register()", "pass",
          U + "test_importing_nestling_alone_is_enough"),
    Break(14, CONFIGURATION, "needs nestling: pip install 'nestling[lm]'", "is another's",
          U + "test_without_nestling_the_message_says_what_to_install"),
    Break(15, LABELS, "yes and not TABLE.search(name)", "yes",
          P + "test_no_embedding_and_no_head_is_orthogonalised"),
    Break(15, LABELS, "hidden[place] = False  # the first", "pass  # the first",
          P + "test_no_embedding_and_no_head_is_orthogonalised"),
    Break(15, LABELS, "if whole or not read[-1]:", "if False:",
          P + "test_no_embedding_and_no_head_is_orthogonalised"),
    Break(15, LABELS, "id(parameter) in tables or parameter.ndim < 2", "parameter.ndim < 2",
          "tests/optim/test_shell.py::test_param_groups_know_embeddings_and_heads"),
    Break(16, SHELL, "return leaf if own else leaf.contiguous()", "return leaf",
          P + "test_state_of_any_rule_is_kept_contiguous"),
    Break(17, MODEL, "pretrained_model_name_or_path: str | os.PathLike[str] | None,",
          "pretrained_model_name_or_path: str | os.PathLike[str] | None, /,",
          U + "test_from_pretrained_has_the_stock_signature"),
    Break(17, CONFIGURATION, 'if "model_type" not in kwargs:', "if True:",
          U + "test_typos_are_refused_at_construction_and_not_in_a_saved_configuration"),
    Break(17, MODEL, "if self.config.output_attentions if asked is None else asked:",
          "if False:", U + "test_attention_weights_are_refused_not_left_out"),
    Break(17, "src/nestling/models/packing.py",
          "if positions.is_meta or not bool(odd.any()):", "if True:",
          U + "test_documents_in_packed_rows_do_not_see_each_other"),
    Break(17, "src/nestling/models/packing.py", "if bool((positions[:, 1:][odd] != 0).any()):",
          "if False:", U + "test_positions_that_mean_nothing_to_a_memory_are_refused"),
    Break(17, "src/nestling/models/embedded.py", "return ids.reshape(shape).to(embeds.device), ",
          "return ids.reshape(shape).to(embeds.device) * 0, ",
          "tests/models/test_embedded.py::test_generation_from_embeddings_is_generation_from_tokens"),
    Break(18, NESTED, 'own = ("levels", "optimizers", "_reduce", "_kept")',
          'own = ("levels", "_reduce", "_kept")', P + "test_copies_go_on_alike[nested]"),
    Break(18, NESTED, "state_dict = state_dict if changed is None else changed", "pass",
          P + "test_load_hooks_may_change_the_state[nested]"),
    Break(18, NESTED, "    plain(optimizer)", "    optimizer.step()",
          P + "test_hooks_run_once[nested]"),
    Break(18, NESTED, "in dict.fromkeys(_parameters(optimizer)):", "in _parameters(optimizer):",
          "tests/optim/test_nested.py"
          "::test_a_parameter_listed_twice_is_warned_of_as_in_torch_and_collected_once"),
    Break(18, SHELL, '{**super().__getstate__(), "_rule": self._rule}', "super().__getstate__()",
          P + "test_copies_go_on_alike[compose]"),
    Break(18, SHELL, "rate.reshape(()) if isinstance(rate, Tensor) else rate", "rate",
          P + "test_rates_that_are_tensors_of_one_element"),
    Break(18, NESTED, "self.defaults[name] = self.param_groups[0][name]", "pass",
          P + "test_schedules_that_cycle_momentum"),
    Break(18, SHELL, "group.setdefault(name, value)", "pass",
          P + "test_settings_younger_than_a_state_are_filled_in"),
    Break(18, "src/nestling/optim/orthogonal.py", "        self._together = False\n",
          "        self._together = False\n"
          '        self.param_groups.append({**self.param_groups[0], "params": []})\n',
          "tests/optim/test_distributed.py::test_two_processes_equal_one"),
    Break(19, "src/nestling/scan/deep/api.py", "    if torch.compiler.is_compiling():",
          "    if False:", X + "test_one_graph_for_a_whole_memory"),
    Break(19, CORE, "return torch.compiler.is_compiling() or mask.is_meta",
          "return mask.is_meta", X + "test_one_graph_for_a_model_with_an_attention_mask[hope]"),
    Break(19, CORE, "return torch.compiler.is_compiling() or mask.is_meta",
          "return torch.compiler.is_compiling()", X + "test_a_model_runs_on_the_meta_device"),
    Break(19, "src/nestling/norm.py",
          "torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()",
          "torch.compiler.is_compiling()", Y + "test_torch_func_gives_the_gradients_of_backward"),
    Break(19, CORE,
          "torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()",
          "torch.compiler.is_compiling()", Y + "test_torch_func_gives_the_gradients_of_backward"),
    Break(19, "src/nestling/scan/backends.py",
          'getattr(_here, "on", False) or torch._C._are_functorch_transforms_active()',
          'getattr(_here, "on", False)', X + "test_transforms_of_torch_func"),
    Break(19, MODEL, "if learn is not False and torch.compiler.is_exporting():", "if False:",
          Y + "test_levels_that_learn_are_exported_without_learning"),
    Break(20, SLOTS, '    (("fc_in",), "fc_out"),  # GPT-J\n', "",
          Z + "test_mlps_of_their_own_kind_learn[gptj]"),
    Break(20, SLOTS, "floating and (isinstance(module, nn.Linear) or _conv(module))",
          "floating and (type(module) is nn.Linear or _conv(module))",
          Z + "test_mlps_of_their_own_kind_learn[falcon]"),
    Break(20, "src/nestling/continuum/stream.py", '("max_position_embeddings", "max_seq_len")',
          '("max_position_embeddings",)', Z + "test_mlps_of_their_own_kind_learn[mpt]"),
    Break(20, SLOTS, "if not found and any(_is_experts(module) for module in block.modules()):",
          "if False:", Z + "test_mlps_of_their_own_kind_learn[mixtral]"),
    Break(20, LEARNER, "if still := left_out(self.model):", "if still := []:",
          Z + "test_the_report_says_that_experts_do_not_learn"),
    Break(20, SLOTS, 'if hasattr(model, "peft_config"):', "if False:",
          Z + "test_what_cannot_be_adapted_says_why"),
    Break(20, SLOTS, "if heads is not None and heads() is None:", "if False:",
          Z + "test_what_cannot_be_adapted_says_why"),
    Break(20, SLOTS, "    if away:", "    if False:", Z + "test_what_cannot_be_adapted_says_why"),
    Break(20, SLOTS, "        if _is_quantised(module):", "        if False:",
          Z + "test_what_cannot_be_adapted_says_why"),
    Break(20, LEARNER, 'prompt = options.pop("input_ids", None)', "pass",
          Z + "test_generate_takes_an_encoding_and_a_chat"),
    Break(20, LEARNER, "ids = chat_ids(prompt, self.tokenizer)[None]",
          "ids = torch.tensor(prompt)[None]", Z + "test_generate_takes_an_encoding_and_a_chat"),
    Break(21, "src/nestling/__init__.py",
          'if error.name not in ("transformers", "tokenizers", "huggingface_hub"):', "if True:",
          U + "test_without_transformers_the_message_says_what_to_install"),
    Break(21, "src/nestling/__init__.py", "from nestling.adaptation import adapt, load_learner",
          "from nestling.adaptation import load_learner",
          "tests/test_package.py::test_public_names_have_types"),
    Break(21, "pyproject.toml", 'Paper = "https://arxiv.org/abs/2512.24695"\n', "",
          "tests/test_package.py::test_the_project_links_what_its_readme_links"),
    Break(22, "src/nestling/cli/options.py", "os.dup2(said.fileno(), 2)", "pass",
          "tests/cli/test_quiet.py::test_nobody_is_heard_within_and_everybody_after"),
    Break(22, "src/nestling/description/svg.py", '"#0369a1"', '"#c2510c"',
          "tests/description/test_pictures.py::test_neighbours_in_a_legend_have_distinct_colours"),
    Break(22, "src/nestling/report/page.py", "figure svg { width: 100%;", "figure svg {",
          "tests/cli/test_learn.py::test_learning_and_writing_with_a_memory"),
    Break(22, "src/nestling/report/demo.py",
          'Page("A model whose levels learn while it reads", first)',
          'Page("A model whose levels learn while it reads", "")',
          "tests/report/test_demo_page.py::test_the_report_tells_everything_and_fetches_nothing"),
    Break(22, "src/nestling/description/modules.py",
          "        if isinstance(module, Chain | Parallel)\n        for number,",
          "        if False\n        for number,",
          "tests/description/test_pictures.py::test_the_levels_of_hope_are_boxes_of_their_own"),
    Break(23, "studies/harness/page.py",
          "old.get(part.title) if part.body is None else list(part.body)", "part.body",
          "tests/studies/test_harness.py::test_a_page_never_loses_what_it_has_no_runs_for"),
    Break(23, "studies/optim/report.py", "*kept(found, old)", "*kept(found, '')",
          "tests/studies/test_harness.py"
          "::test_the_optimizers_page_keeps_the_parts_that_were_not_run"),
    Break(23, STORE, "if (copied := self.copied().get(key)) is not None:", "if copied := None:",
          "tests/studies/test_store.py::test_the_copy_stands_in_for_a_lost_folder"),
    Break(24, MODEL, "if main and not card.exists():", "if False:",
          "tests/models/test_card.py::test_a_saved_model_has_a_card_that_says_what_it_is"),
    Break(24, MODEL, "and GENERATED in card.read_text", "and GENERATED not in card.read_text",
          "tests/models/test_card.py::test_our_card_is_pushed_where_the_hub_has_none"),
    Break(24, "notebooks/keep_learning.ipynb", "report = learner.learn(read)",
          "report = learner.learn(read[:2])", "tests/test_notebooks.py::test_a_notebook_runs"),
    Break(24, "src/nestling/pretrained/__init__.py", "HOME = Path(__file__).parent",
          'HOME = Path(__file__).parent / "none"',
          "tests/models/test_shipped.py::test_it_has_learned_english_and_learns_on"),
]  # fmt: skip


THEIRS = (  # imported once; each test runs in a fork that imports only ours
    "torch", "numpy", "pytest", "hypothesis", "rich", "safetensors.torch", "tokenizers",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.generation.utils",
)  # fmt: skip


def standing(one: Break, root: Path = ROOT) -> str:
    """The fault of an entry, or nothing: its guard must stand once, and its test must exist."""
    if (count := (root / one.file).read_text().count(one.guard)) != 1:
        return f"{one.file}: {one.guard!r} stands there {count} times"
    file, _, name = one.test.partition("::")
    if name and f"def {name.partition('[')[0]}(" not in (root / file).read_text():
        return f"{file}: no test {name}"
    return ""


def caught(one: Break, copy: Path, seconds: float) -> tuple[bool, str]:
    """Whether the test fails on the copy with the guard taken out, and what it says of it."""
    path = copy / one.file
    facts, text = path.stat(), path.read_text()
    path.write_text(text.replace(one.guard, one.broken))
    try:
        code, said = ended([one.test], copy, seconds)
    finally:
        path.write_text(text)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # its compiled form is right
    if code == 1:
        return True, f"noticed: {said}"
    why = "it passed" if code == 0 else f"no end after {seconds:.0f} s"
    return False, f"NOT NOTICED by {one.test}: {why}"


def ended(tests: list[str], copy: Path, seconds: float) -> tuple[int, str]:
    """Pytest's code on the copy (0 passed, 1 failed, -9 it hung), and the first failure."""
    log, why = copy.parent / "log", copy.parent / "why"
    why.write_text("")
    child = os.fork()
    if child == 0:
        os.setsid()
        _test(copy, tests)
    deadline = time.monotonic() + seconds
    while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):  # and what it started
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(done[1] if done[0] else os.waitpid(child, 0)[1])
    if code not in (0, 1, -signal.SIGKILL):
        said = log.read_text()[-1500:]
        raise SystemExit(f"{tests}: pytest ended with {code}, so nothing is shown:\n{said}")
    return code, why.read_text().strip()


class _Failures:
    """A plugin of pytest that writes the first line of the first failure to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.file.read_text():
            crash = getattr(report.longrepr, "reprcrash", None)
            said = getattr(crash, "message", str(report.longrepr)) or "it failed"
            self.file.write_text(f"{report.nodeid}: {said.splitlines()[0][:200]}")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.file.write_text(f"{report.nodeid}: {str(report.longrepr)[-200:]}")


_LINE = [*"-x -p no:cacheprovider --no-summary".split(), "-W", "ignore::pytest.PytestWarning"]


def _test(copy: Path, tests: list[str]) -> NoReturn:
    """Run tests on the copy, in a process that ends with pytest's code."""
    import traceback

    import pytest

    code = 3
    try:
        with open(copy.parent / "log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = f"{copy / 'src'}:{copy}"
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = len(tests) == 1  # only what is whole is kept in compiled form
        sys.path[:0] = [str(copy / "src"), str(copy)]
        code = int(pytest.main([*_LINE, *tests], plugins=[_Failures(copy.parent / "why")]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", type=int, nargs="+", help="only those of these points")
    parser.add_argument("--guard", type=int, nargs="+", help="only those of these numbers")
    parser.add_argument("--seconds", type=float, default=300, help="for one test (hangs)")
    given = parser.parse_args()
    if wrong := [said for one in BREAKS if (said := standing(one))]:
        raise SystemExit("\n".join(wrong))
    for name in THEIRS:
        importlib.import_module(name)
    chosen = [
        (number, one)
        for number, one in enumerate(BREAKS)
        if (given.point is None or one.point in given.point)
        and (given.guard is None or number in given.guard)
    ]
    missed, tests = 0, sorted({one.test for _, one in chosen})
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "tree"
        skipped = shutil.ignore_patterns(".git", ".venv", "runs", "site", "__pycache__", ".*cache")
        shutil.copytree(ROOT, copy, ignore=skipped)
        code, said = ended(tests, copy, given.seconds * len(tests))
        if code:
            raise SystemExit(f"with every guard in place, the tests end with {code}: {said}")
        print(f"with every guard in place, {len(tests)} tests pass", flush=True)
        for number, one in chosen:
            good, said = caught(one, copy, given.seconds)
            missed += not good
            what = f"{number}, point {one.point}: without {one.guard.strip()[:50]!r}"
            print(f"{what}: {said}", flush=True)
    print(f"{len(chosen)} guards taken out, one at a time: {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
