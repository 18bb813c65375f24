"""Predicted and true log mass of far keys: every head of a hybrid, and a picture of two. HYBRID TEXT PICTURE"""
import sys, torch
torch.set_num_threads(1)
import matplotlib; matplotlib.use("Agg"); import matplotlib.pyplot as plt
import modeling_llamba
from transformers import AutoModelForCausalLM, AutoTokenizer
from convert.alignment.read_fit import far_log_mass
from convert.alignment.text import documents, token_rows
from modeling_llamba.hybrid_mixer import HybridMixer
folder = sys.argv[1]
tok = AutoTokenizer.from_pretrained(folder); ids = token_rows(documents(sys.argv[2]), tok, 1024, 3, "owt")
m = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
found = {}
def hook(i):
    def f(mixer, args, kwargs, out):
        near = kept[i]; read = mixer.read; far = read.far(near); start = mixer.near_tokens + 64
        true, said = far_log_mass(mixer, near)[:, start:], read.log_mass(far)[:, start:]
        near_mass = near.log_mass[:, start:]
        theory = torch.log(far.count[:, start:]).repeat_interleave(3, -1) + (far.query * far.key_mean.repeat_interleave(3, 2)).sum(-1)[:, start:]
        g = torch.sigmoid(true - near_mass); w = g * (1 - g)
        for h in range(mixer.attention.heads):
            if h in mixer.attention.full_heads: continue
            e = ((torch.sigmoid(said[..., h] - near_mass[..., h]) - g[..., h]) ** 2).mean().sqrt().item()
            t = ((torch.sigmoid(theory[..., h] - near_mass[..., h]) - g[..., h]) ** 2).mean().sqrt().item()
            r2 = 1 - (w[..., h] * (said[..., h] - true[..., h]) ** 2).sum() / (w[..., h] * (true[..., h] - (w[..., h] * true[..., h]).sum() / w[..., h].sum()) ** 2).sum()
            found[i, h] = (e, t, r2.item(), g[..., h].mean().item(), said[..., h].flatten(), true[..., h].flatten(), (near_mass[..., h]).flatten())
    return f
kept = {}
for i, layer in enumerate(m.model.layers):
    mixer = next(x for x in layer.modules() if isinstance(x, HybridMixer))
    mixer.attention.register_forward_hook(lambda mod, a, out, i=i: kept.__setitem__(i, out))
    mixer.register_forward_hook(hook(i), with_kwargs=True)
with torch.no_grad(): m(ids, use_cache=False, logits_to_keep=1)
e, t, r, g = (torch.tensor([v[k] for v in found.values()]) for k in range(4))
print("heads", len(e), "gate error rms: median", e.median(), "90%", e.quantile(.9), "max", e.max(), "theory mass", t.median(), t.quantile(.9)); print("R2 median", r.median(), "10%", r.quantile(.1))
busy = {k: v for k, v in found.items() if v[3] > .15}
ranked = sorted(busy, key=lambda k: busy[k][0]); print([(k, [round(x, 3) for x in busy[k][:4]]) for k in ranked[:5] + ranked[-8:]])
good, bad = max(busy, key=lambda k: busy[k][2]), max(busy, key=lambda k: busy[k][0])
fig, axes = plt.subplots(1, 2, figsize=(8, 3.6))
for ax, (k, name) in zip(axes, ((good, "a good head"), (bad, "the worst head"))):
    v = found[k]; s = slice(None, None, 3)
    ax.scatter(v[5][s], v[4][s], s=3, alpha=.4, lw=0); lo, hi = v[5].quantile(.002).item(), v[5].quantile(.998).item(); ax.plot([lo, hi], [lo, hi], "k", lw=.8)
    ax.set(title=f"{name}: layer {k[0]}, head {k[1]}\nerror of the gate {v[0]:.3f}, mean gate {v[3]:.2f}", xlabel="true log mass of the far keys", ylabel="predicted")
fig.tight_layout(); fig.savefig(sys.argv[3], dpi=110)
