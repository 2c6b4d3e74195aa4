import torch
from teacher_logits.selection import select_top_k
from teacher_logits.invariants import check_invariants
from tests.encoded import written
from teacher_logits.layout import *
torch.manual_seed(0)
# find the smallest magnitude that honest fp32 payload refuses
for temps in ((1.0,.5),(1.0,2.0),(1.,4.),(1.0,.1)):
  for off in (50,100,200,400,800,1600,5000,-5000):
    bad=0
    for s in range(20):
        x=torch.randn(64,300)*3+off
        w=written(x,top_k=64,temperatures=temps)
        try: check_invariants(w.columns,vocab_size=300,temperatures=temps)
        except Exception as e: bad+=1
    print(temps,off,bad,'/20')
for t in (1e-40,1e-38,1e-30,1e-10,1e-5,1e5,1e30,1e38):
    s=select_top_k(torch.randn(2,7)*10,k=3,temperatures=(1.0,t)); print(t,s.log_tail[0],s.logsumexp[0])
